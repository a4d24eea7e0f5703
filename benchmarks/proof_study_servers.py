"""The servers of the proof study: right ones, and each fault that admission has to find."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["SERVERS", "Served"]


@dataclass(frozen=True)
class Served:
    """A vLLM on `checkpoint`, declared to be `artifact` with its E5M2 cache."""

    name: str
    artifact: Literal["under", "plain", "over"]
    checkpoint: str
    cache: Literal["fp8_e5m2", "fp8_e4m3", "auto"] = "fp8_e5m2"
    cause: str | None = None  # what it has to be called, or how that begins; None: it is right

    @property
    def honest(self) -> bool:
        return self.cause is None

    def names(self, name: str) -> bool:
        return self.cause is not None and any(name.startswith(x) for x in self.cause.split("|"))


SERVERS = (
    Served("under-correct", "under", "under"),
    Served("under-nokscale", "under", "under-nokscale", cause="k_scale_dropped"),
    Served("under-halved", "under", "under-halved", cause="weight_scales_scaled, layer 3, x0.5"),
    Served("under-bf16-e5m2", "under", "under-model", cause="unquantized"),
    Served("under-bf16-auto", "under", "under-model", "auto", cause="unquantized"),
    Served("under-e4m3", "under", "under", "fp8_e4m3", cause="kv_scales_swapped|kv_cache_e4m3"),
    Served("other", "under", "other", cause="another_model"),
    Served("plain-correct", "plain", "plain"),
    Served("plain-bf16-e5m2", "plain", "plain-model", cause="unquantized"),
    Served("plain-e4m3", "plain", "plain", "fp8_e4m3", cause="kv_scales_swapped|kv_cache_e4m3"),
    Served("over-correct", "over", "over"),
    Served("over-nokscale", "over", "over-nokscale", cause="k_scale_dropped"),
)
