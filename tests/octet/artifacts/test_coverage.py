"""What golden prompts examine is counted over the prompts that were answered."""

from octet.artifacts.coverage import coverage
from octet.artifacts.golden import GoldenRecord, GoldenSet, Scope, Top, spread

SCOPE = Scope(
    vocabulary=100, context=2048, experts=16, held_out=1000, counts={1: 500, 2: 300, 3: 5}
)


def record(*ids: int, experts: str = "") -> GoldenRecord:
    top = Top(token_ids=(1,), logprobs=(0.0,))
    return GoldenRecord(
        prompt="",
        prompt_token_ids=ids,
        continuation_token_ids=(1,),
        tops=(top,),
        experts=experts,
    )


def golden(scope: Scope | None) -> GoldenSet:
    records = (record(1, 2, 1, experts="0005"), record(3, 4, experts="8004"))
    return GoldenSet(
        weights_sha256="", compute_dtype="float32", software={}, records=records, scope=scope
    )


def test_only_the_prompts_that_were_sent_count() -> None:
    found = coverage(golden(SCOPE), [0])
    assert found is not None
    assert found.text == (
        "2 of 100 token ids (20 % of held-out tokens are others), up to 3 of 2,048 positions,"
        " 2 of 16 experts"
    )
    whole = coverage(golden(SCOPE), [0, 1])
    assert whole is not None
    assert (whole.ids, round(whole.outside, 6), whole.longest, whole.experts) == (4, 0.195, 3, 3)


def test_golden_records_of_an_earlier_release_say_nothing() -> None:
    assert coverage(golden(None), [0, 1]) is None


def test_evenly_spaced_numbers_include_both_ends() -> None:
    assert spread(10, 4) == [0, 3, 6, 9]
    assert spread(3, 24) == [0, 1, 2]
    assert spread(1, 24) == [0]
    assert spread(0, 24) == []
