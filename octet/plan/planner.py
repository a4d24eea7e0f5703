"""Plans how vLLM serves a model on a kind of GPU, for each recipe and cache.

model + GPU + load → smallest tensor parallelism that fits → memory, longest context, batch, speed
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

from octet.artifacts.manifest import MANIFEST_FILE, Manifest
from octet.errors import CheckpointError, ConfigError
from octet.hardware.devices import Device, devices
from octet.hardware.support import Outcome, support
from octet.model.checkpoint import Checkpoint
from octet.model.gpt_oss import refuse_gpt_oss
from octet.model.not_a_checkpoint import explain_file, explain_missing, explain_without_config
from octet.model.spec import ModelSpec
from octet.model.tensor_parallel import problem_of
from octet.plan.measured import Basis, Measurement, estimate
from octet.plan.roofline import Load, Roofline
from octet.plan.sizes import Sizes
from octet.plan.vllm_memory import (
    BLOCK,
    UTILIZATION,
    Engine,
    Memory,
    default_batched_tokens,
    divide,
    usable_memory,
)
from octet.recipe import PRESETS, KvCacheDtype, Recipe
from octet.storage.files import read_object

__all__ = ["SHARED", "VLLM", "Goal", "Model", "Plan", "Row", "make_plan", "parse_tokens"]

VLLM = "0.24"  # the version whose memory and support are planned
DEGREES = (1, 2, 4, 8)
CACHES: tuple[KvCacheDtype, ...] = get_args(KvCacheDtype)[::-1]  # the most exact one first
_TOKENS = re.compile(r"(\d{1,9})([km]?)")
_DTYPES = {"float32": 4, "float64": 8}


@dataclass(frozen=True)
class Model:
    """A model to plan for: its sizes, and the recipes and caches to compare."""

    name: str
    spec: ModelSpec
    recipes: tuple[Recipe | None, ...]  # None: not quantized
    caches: tuple[KvCacheDtype, ...]
    width: int = 2  # bytes of an unquantized element in the checkpoint

    @classmethod
    def open(cls, path: Path) -> "Model":
        """Reads an artifact, or a checkpoint's config.json; its weights may be missing.

        An artifact is planned with its own recipe, and a checkpoint with its own cache; a model
        with all presets, and unquantized. An unknown architecture needs its weights, of which only
        the headers are read.
        """
        if not path.exists():
            raise explain_missing(path)
        if not path.is_dir():
            raise explain_file(path)
        if (path / MANIFEST_FILE).exists():
            manifest = Manifest.load(path, verify=False)
            cache = manifest.details.get("kv_cache") if manifest.kind == "checkpoint" else None
            caches = (cache,) if cache in CACHES else CACHES
            return cls(manifest.model.name, manifest.model.spec, (manifest.recipe,), caches)
        if not (path / "config.json").exists():
            raise explain_without_config(path)
        config = read_object(path / "config.json", CheckpointError)
        if any(path.glob("*.safetensors")):
            spec = Checkpoint.open(path).spec
        else:
            spec = ModelSpec.from_config(config, str(path))
        refuse_gpt_oss(spec, path)
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "")
        name = path.resolve().name
        return cls(name, spec, (None, *PRESETS.values()), CACHES, _DTYPES.get(dtype, 2))


@dataclass(frozen=True)
class Goal:
    """The load to serve: `concurrency` requests at a time, which fill `context` tokens each.

    `output` of these tokens are generated. `price` is in dollars per GPU and hour.
    """

    device: Device
    context: int
    concurrency: int
    output: int
    price: float | None = None

    @property
    def load(self) -> Load:
        return Load(self.concurrency, self.context - self.output, self.output)


@dataclass(frozen=True)
class Row:
    """One recipe with one cache, on the smallest number of GPUs that suffices.

    `memory` is that of one GPU. `longest_context` is at the planned concurrency, `largest_batch` at
    the planned context. `cost` is in dollars per million output tokens.
    """

    recipe: str
    kv_cache: KvCacheDtype
    support: Outcome
    checkpoint_bytes: int
    tensor_parallel: int
    memory: Memory
    longest_context: int
    largest_batch: int
    tokens_per_s: float | None
    basis: Basis
    cost: float | None
    flags: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Returns plain data; bytes are of one GPU."""
        memory = asdict(self.memory) | {"blocks": self.memory.blocks, "tokens": self.memory.tokens}
        return {**vars(self), "memory": memory, "flags": list(self.flags)}


@dataclass(frozen=True)
class Plan:
    """All rows, and why other combinations are left out."""

    model: str
    goal: Goal
    usable_bytes: int  # of each GPU
    rows: tuple[Row, ...]
    left_out: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Returns plain data."""
        goal = self.goal
        return {
            "model": self.model,
            "gpu": goal.device.name,
            "gpu_memory_bytes": self.usable_bytes,
            "context": goal.context,
            "concurrency": goal.concurrency,
            "output": goal.output,
            "price": goal.price,
            "vllm": VLLM,
            "rows": [row.as_json() for row in self.rows],
            "left_out": list(self.left_out),
        }


def parse_tokens(text: str) -> int:
    """Parses a number of tokens: 8192, 32k (times 1024) or 1m; raises ConfigError for others."""
    match = _TOKENS.fullmatch(text.lower())
    tokens = int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2]] if match else 0
    if tokens < 1:
        raise ConfigError(f"--context {text}: write a number of tokens, such as 8192 or 32k")
    return tokens


def make_plan(model: Model, goal: Goal, measurements: Sequence[Measurement] = ()) -> Plan:
    """Returns the plan; raises ConfigError for a goal that cannot be met, with what can be."""
    if goal.device.memory is None:
        raise ConfigError(_without_memory(goal.device))
    if goal.context > model.spec.max_positions:
        raise ConfigError(
            f"--context {goal.context}: {model.name} takes {model.spec.max_positions} tokens at"
            " most; give a shorter one"
        )
    if not 0 < goal.output < goal.context:
        raise ConfigError(
            f"--output {goal.output}: give a number of tokens below the context of {goal.context}"
        )
    rows, left_out = [], []
    for recipe in model.recipes:
        sizes = Sizes(model.spec, recipe)
        for kv_cache in model.caches:
            found = _row(model, sizes, kv_cache, goal, measurements)
            if isinstance(found, Row):
                rows.append(found)
            else:
                text = f"{_name(recipe)} with a cache of {kv_cache}: {found.reason}"
                left_out.append(replace(found, reason=text))
    if not rows:
        nearest = max(left_out, key=lambda one: one.tokens)
        raise ConfigError(f"{model.name} on {goal.device.name}: {nearest.reason}")
    reasons = tuple(one.reason for one in left_out)
    return Plan(model.name, goal, usable_memory(goal.device.memory), tuple(rows), reasons)


@dataclass(frozen=True)
class _LeftOut:
    """Why a combination has no row, and how many tokens its cache would hold."""

    reason: str
    tokens: int = -1


def _row(
    model: Model,
    sizes: Sizes,
    kv_cache: KvCacheDtype,
    goal: Goal,
    measurements: Sequence[Measurement],
) -> Row | _LeftOut:
    """Returns a row, or why there is none."""
    assert goal.device.memory is not None
    memory = usable_memory(goal.device.memory)
    found = support(goal.device, "vllm", VLLM, sizes.recipe, kv_cache)
    if found.outcome in ("refused", "corrupt"):
        return _LeftOut(f"vLLM {VLLM}: {found.outcome}: {found.message or found.remedy}")
    batched = default_batched_tokens(goal.device.memory, goal.device.name)
    batched = max(batched, goal.concurrency)
    problem, short = None, None
    for degree in DEGREES:
        own = problem_of(sizes.spec, sizes.recipe, degree)
        if own is not None:
            problem = f"{degree} GPUs: {own}"
            continue
        engine = Engine(degree, goal.concurrency, batched)
        divided = divide(sizes, kv_cache, engine, memory)
        if _blocks_per_request(goal.context) * goal.concurrency > divided.blocks:
            short = (degree, divided)
            continue
        roofline = Roofline(sizes, kv_cache, goal.device, degree, found.weights == "native")
        speed, basis = estimate(roofline, goal.load, measurements)
        cost = None
        if speed is not None and goal.price is not None:
            cost = goal.price * degree / (speed * 3600) * 1e6
        return Row(
            recipe=_name(sizes.recipe),
            kv_cache=kv_cache,
            support=found.outcome,
            checkpoint_bytes=sizes.checkpoint_bytes(kv_cache, model.width),
            tensor_parallel=degree,
            memory=divided,
            longest_context=_longest(sizes.spec, divided, goal.concurrency),
            largest_batch=_largest(sizes, kv_cache, engine, memory, goal.context),
            tokens_per_s=speed,
            basis=basis,
            cost=cost,
            flags=_flags(goal, kv_cache, engine),
        )
    if short is None:
        return _LeftOut(problem or "no number of GPUs up to 8 can share it")
    return _LeftOut(_too_large(sizes, short, memory, goal), short[1].tokens)


def _blocks_per_request(context: int) -> int:
    """Returns the KV-cache blocks of a request of `context` tokens."""
    return -(-context // BLOCK)


def _longest(spec: ModelSpec, memory: Memory, concurrency: int) -> int:
    """Returns the longest context, in tokens, with which `concurrency` requests fit."""
    return min(spec.max_positions, memory.blocks // concurrency * BLOCK)


def _largest(
    sizes: Sizes, kv_cache: KvCacheDtype, engine: Engine, memory: int, context: int
) -> int:
    """Returns the largest batch of requests of `context` tokens that fits, by bisection.

    A larger batch leaves less for the cache, because a token is sampled for all requests at once.
    """

    def fitting(batch: int) -> int:
        batched = max(engine.max_num_batched_tokens, batch)
        larger = replace(engine, max_num_seqs=batch, max_num_batched_tokens=batched)
        return divide(sizes, kv_cache, larger, memory).blocks // _blocks_per_request(context)

    low = engine.max_num_seqs  # as many are known to fit
    high = max(fitting(low), low)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fitting(middle) >= middle else (low, middle - 1)
    return low


def _too_large(sizes: Sizes, short: tuple[int, Memory], memory: int, goal: Goal) -> str:
    degree, divided = short
    gib = 2**30
    if divided.cache < _blocks_per_request(1) * BLOCK * divided.token_bytes:
        return (
            f"does not fit on {degree} GPUs: its weights take {divided.weights / gib:.1f} of the"
            f" {memory / gib:.1f} GiB of each; take fewer bits, or larger GPUs"
        )
    context = _longest(sizes.spec, divided, goal.concurrency)
    batch = divided.blocks // _blocks_per_request(goal.context)
    ways = [f"--concurrency {batch}"] if batch else []
    ways += [f"--context {context}"] if context else []
    what = f"{goal.concurrency} requests of {goal.context} tokens do not fit on {degree} GPUs"
    remedy = " or ".join(ways) or "fewer and shorter ones"
    return f"{what}, whose cache holds {divided.tokens} tokens; give {remedy}"


SHARED = 8  # words of a row's options that all rows share, which come first


def _flags(goal: Goal, kv_cache: KvCacheDtype, engine: Engine) -> tuple[str, ...]:
    """Returns the options of `vllm serve`; those that are its defaults are left out."""
    flags = ["--max-model-len", str(goal.context), "--max-num-seqs", str(engine.max_num_seqs)]
    flags += ["--max-num-batched-tokens", str(engine.max_num_batched_tokens)]
    flags += ["--gpu-memory-utilization", str(UTILIZATION)]
    if engine.tensor_parallel > 1:
        flags += ["--tensor-parallel-size", str(engine.tensor_parallel)]
    if kv_cache != "float16":
        flags += ["--kv-cache-dtype", f"fp8_{kv_cache}"]
    return tuple(flags)


def _name(recipe: Recipe | None) -> str:
    return "bf16" if recipe is None else recipe.name


def _without_memory(device: Device) -> str:
    """Returns the error for a device whose memory is not known; says what would run on it."""
    named = [f"{x} {support(device, 'vllm', VLLM, x, 'float16').weights}" for x in ("fp8", "nvfp4")]
    known = ", ".join(one.name.lower() for one in devices() if one.memory is not None)
    return (
        f"--gpu {device.name}: its memory is not known, so nothing can be planned (vLLM {VLLM}"
        f" would run {' and '.join(named)}); name one of {known}"
    )
