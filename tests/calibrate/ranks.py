"""One rank of a calibration under torchrun: `ranks.py MODEL OTHER_MODEL DIRECTORY`."""

import os
import sys
from pathlib import Path

import pytest
import torch

from calibrate.journal.distributed import process_group
from octet.errors import OctetError
from tests.calibrate.runs import interrupt_after, run, save_counts


def main(model: Path, other: Path, directory: Path) -> None:
    torch.set_num_threads(1)
    with process_group("cpu") as (group, _):
        observed = run(model, group=group)
        save_counts(directory / f"counts-{group.rank}", observed)

        # Interrupted on every rank in the second layer, and continued from the shared journal.
        with pytest.raises(KeyboardInterrupt):
            run(model, directory / "journal", group=group, advance=interrupt_after(0.51))
        finished = len(list((directory / "journal").glob("layer-*.json")))
        group.agree(None)
        resumed = run(model, directory / "journal", group=group)
        save_counts(directory / f"resumed-{group.rank}", resumed)

        save_counts(directory / f"single-{group.rank}", run(model, group=group, count=1))

        errors = [f"{finished} finished"]
        mine = other if group.rank else model
        for settings in ({"count": 5 + group.rank}, {}):
            try:
                run(model if "count" in settings else mine, group=group, **settings)
            except OctetError as error:
                errors.append(str(error))
        # NaN in the other model's embeddings of what only batch 1 holds: rank 1's, told by both.
        try:
            run(other, group=group)
        except OctetError as error:
            errors.append(str(error))
        # A place that rank 1 alone cannot write to.
        (directory / "file").touch()
        spill = directory / ("file" if group.rank else "spill")
        for journal in (None, directory / "spilled"):
            try:
                run(model, journal, group=group, spill=spill)
            except OctetError as error:
                errors.append(str(error))
        (directory / f"errors-{group.rank}").write_text("\n".join(errors))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
    # gloo's threads can outlive the group, and a thread that comes for an interpreter that is
    # ending brings the process down ("terminate called without an active exception").
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
