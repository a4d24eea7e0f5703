"""Steps of gradient descent, which several processes take together."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Adam
from torch.optim.lr_scheduler import LambdaLR

from calibrate.journal.distributed import Group
from octet.errors import NumericsError

__all__ = ["Descent", "order"]

_WARM_UP = 0.1  # share of the steps in which the learning rate rises
_BETAS = (0.9, 0.95)  # of Adam: a short training has no use for a long memory
_LARGEST_GRADIENT = 1.0  # its norm over all parameters, above which it is scaled down


class Descent:
    """Adam over `total` steps, of which `done` were taken before.

    The learning rate rises to `rate`, then falls to 0 as a cosine does. Each rank of `group` has
    the same parameters and takes the same steps, by the gradient of the mean over the tokens of
    all ranks. `where` names what is trained, in errors.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        rate: float,
        total: int,
        group: Group,
        *,
        done: int = 0,
        where: str = "",
    ) -> None:
        rise = max(1.0, _WARM_UP * total)

        def share(step: int) -> float:
            return min((step + 1) / rise, 0.5 + 0.5 * math.cos(math.pi * step / total))

        self._parameters, self._rate, self._group = parameters, rate, group
        self._done, self._where = done, where
        self.optimizer = Adam([{"params": parameters, "initial_lr": rate}], lr=rate, betas=_BETAS)
        self._schedule = LambdaLR(self.optimizer, share, last_epoch=done - 1)

    def step(self, backward: Callable[[], float], tokens: int) -> float:
        """Takes a step, and returns the mean loss over the tokens of all ranks.

        `backward` adds the gradients of the mean loss over the `tokens` of this rank, and returns
        that loss; it is not called without tokens. Raises NumericsError, on every rank, if the loss
        is not finite.
        """
        self.optimizer.zero_grad()
        own = self._group.attempt(backward if tokens else lambda: 0.0)
        found = self._group.gather((own, tokens))
        all_tokens = sum(count for _, count in found)
        loss = math.fsum(value * (count / all_tokens) for value, count in found)
        if not math.isfinite(loss):
            error = NumericsError(
                f"the loss{self._where} is not finite after {self._done} steps of training: give a"
                f" lower --learning-rate than {self._rate:g}"
            )
            self._group.agree(error)
        if self._group.world > 1:
            self._average(tokens / all_tokens)
        clip_grad_norm_(self._parameters, _LARGEST_GRADIENT)
        self.optimizer.step()
        self._schedule.step()
        self._done += 1
        return loss

    @torch.no_grad()
    def _average(self, share: float) -> None:
        for parameter in self._parameters:
            if parameter.grad is None:  # this rank has no tokens left
                parameter.grad = torch.zeros_like(parameter)
            self._group.add(parameter.grad.mul_(share))


def order(epoch: int, count: int, steps: int) -> list[int | None]:
    """Returns which of a rank's `count` batches each step of an epoch takes; None if none is left.

    `steps` are as many as the rank with the most batches has.
    """
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).tolist()
    return [*shuffled, *[None] * (steps - count)]
