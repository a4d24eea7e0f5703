"""The command line: one typer app, whose commands import their stage when they are called."""

import atexit
import errno
import gc
import io
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from octet import __version__
from octet.errors import ConfigError, OctetError, printable
from octet.hardware.cores import wait_briefly
from octet_cli.bench import bench
from octet_cli.calibrate import calibrate, recover, rescale
from octet_cli.deploy import deploy
from octet_cli.doctor import doctor
from octet_cli.drift import drift
from octet_cli.evaluate import evaluate
from octet_cli.export import build_engine, export
from octet_cli.golden import golden
from octet_cli.help import Command, Group, examples_of
from octet_cli.keys import keys
from octet_cli.packages import DISTRIBUTION, PACKAGES, find_foreign, locate
from octet_cli.plan import plan
from octet_cli.prewarm import prewarm
from octet_cli.prove import prove
from octet_cli.replay import replay
from octet_cli.rollout import rollout
from octet_cli.serve import serve
from octet_cli.verify import verify

__all__ = ["app", "build_engine_main", "calibrate_main", "main"]

# The first rank that ends makes torchrun end all others: it has to be the one that prints.
_PRINTING_S = 10.0

app = typer.Typer(
    help="From a Hugging Face checkpoint to an FP8 or FP4 service that can prove what it serves.",
    cls=Group,
    epilog=examples_of("octet"),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (
    *(calibrate, rescale, recover, replay, drift, build_engine, golden, verify),
    *(evaluate, bench, plan, doctor, prewarm, serve, prove, rollout),
):
    called = command.__name__.replace("_", "-")
    app.command(called, cls=Command, epilog=examples_of(called))(command)
app.add_typer(export, name="export")
app.add_typer(keys, name="keys")
app.add_typer(deploy, name="deploy")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and where its packages are.")
    ] = False,
) -> None:
    if version:
        print(f"octet {__version__}")
        for package in PACKAGES:
            print(f"{package}: {locate(package) or 'missing'}")
        for warning in find_foreign():
            print(f"warning: {warning}", file=sys.stderr)
        raise typer.Exit


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a command; exits with one line on standard error, and 2 for a user's mistake."""
    wait_briefly()
    if isinstance(sys.stdout, io.TextIOWrapper):  # in a locale without UTF-8, "?" for what it lacks
        sys.stdout.reconfigure(errors="replace")
    atexit.register(gc.freeze)  # skips a 1 s search for cycles in torch's million objects
    arguments = list(sys.argv[1:] if argv is None else argv)
    for ending in (
        (signal.SIGTERM, signal.SIGHUP) if hasattr(signal, "SIGHUP") else (signal.SIGTERM,)
    ):
        if signal.getsignal(ending) is not signal.SIG_IGN:  # nohup sets it
            signal.signal(ending, _terminate)
    try:
        command: Any = typer.main.get_command(app)
        _require_text(arguments)
        code = command.main(arguments, prog_name="octet", standalone_mode=False) or 0
        if code == 130:  # typer has turned KeyboardInterrupt into this code
            raise KeyboardInterrupt
        sys.exit(code)
    except OctetError as error:
        if error.printed_elsewhere:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(_PRINTING_S)
            sys.exit(error.exit_code)
        _fail(str(error), error.exit_code)
    except BrokenPipeError:
        sys.exit(141)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            _fail(
                f"{error.filename or 'output'}: no space left on the disk; free some and run the"
                " same command again"
            )
        if error.strerror is None:
            raise
        _fail(f"{error.filename or 'input or output'}: {error.strerror}")
    except (ImportError, AttributeError) as error:
        _fail(_explain(error))
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        # Typer bundles its own copy of click, so only this method identifies its errors.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        if not message():
            sys.exit(2)  # the help has been printed
        _fail(message().replace("Value error, ", ""))  # pydantic's, for a wrong choice


def calibrate_main() -> NoReturn:
    """`calibrate`, as a command of its own."""
    main(["calibrate", *sys.argv[1:]])


def build_engine_main() -> NoReturn:
    """`build-engine`, as a command of its own."""
    main(["build-engine", *sys.argv[1:]])


def _fail(message: str, code: int = 2) -> NoReturn:
    print(f"error: {printable(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(code)


def _require_text(arguments: Sequence[str]) -> None:
    """Raises ConfigError for an argument that the locale cannot decode.

    Python passes its bytes on as surrogates, which the Rust and C++ libraries below do not take.
    """
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            encoding = sys.getfilesystemencoding()
            remedy = "set PYTHONUTF8=1, or LC_ALL=C.UTF-8"
            if encoding == "utf-8":
                remedy = "rename the file"
            raise ConfigError(f"{argument}: not {encoding.upper()} text; {remedy}") from None


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # so that half-written files are removed then, too


_EXTRA_OF = {
    "torch": "calibrate",
    "transformers": "calibrate",
    "plotly": "calibrate",
    "pyarrow": "datasets",
    "cuda": "gpu",
    "modelopt": "modelopt",
    "numba": "export",
    "onnx": "export",
    "onnxruntime": "export",
    "fastapi": "serve",
    "uvicorn": "serve",
    "aiohttp": "serve",
    "tokenizers": "serve",
    "prometheus_client": "serve",
    "tritonclient": "serve",
    "jinja2": "serve",
}


def _explain(error: ImportError | AttributeError) -> str:
    """Returns the extra that a missing module belongs to, or which package is not Octet's.

    Raises `error` again if it is neither: it is a defect in Octet.
    """
    package = (error.name or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and package in _EXTRA_OF:
        return f"this command needs {package}: pip install '{DISTRIBUTION}[{_EXTRA_OF[package]}]'"
    foreign = next(find_foreign(), None)
    if foreign is None:
        raise error
    return foreign


if __name__ == "__main__":
    main()
