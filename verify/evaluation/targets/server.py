"""Evaluates a server of OpenAI's protocol, by the log-probabilities that it returns of a prompt.

It uses vLLM's `prompt_logprobs`, or `echo` with `logprobs` if the server can name tokens by id
(Octet's own server). Prompts are sent as token ids; vLLM also gets a fresh `cache_salt`, because
the prefix cache must not answer.
"""

import asyncio
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from octet.errors import BackendError, ConfigError, RequestError, UnsupportedError
from serve.config.backends import HttpConfig, key_in
from verify.evaluation.target import Answer
from verify.evaluation.targets.client import Client
from verify.evaluation.targets.server_logprobs import READERS, AnotherTokenizer, NotReturned

__all__ = ["Server"]


class Server:
    """A `Target` at `http://host:port[/model]`; the model is optional if there is only one."""

    vocabulary: int | None = None
    decode = None
    lasting = False

    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        api_key_env: str | None = None,
        concurrency: int = 4,
    ) -> None:
        """Queries the server for its models.

        `name` replaces the URL, also in reports, for a server that had another port before.
        Raises ConfigError for an invalid URL, BackendUnavailable if nothing answers there.
        """
        self.name = name or url
        parts = urlsplit(url)
        self.url = f"{parts.scheme}://{parts.netloc}"
        try:
            config = HttpConfig(type="openai", url=self.url, api_key=key_in(api_key_env))
        except ValueError as error:
            reason = str(error).splitlines()[-2].strip()
            raise ConfigError(f"{url}: not a server's URL ({reason})") from None
        self._key, self._concurrency = config.key(), concurrency
        self._tokenizes = True
        self._reader = ""
        self.model, said = self._choose(parts.path.strip("/").removeprefix("v1").strip("/"))
        length = said.get("max_model_len")
        # One token has to be generated after the prompt.
        self.longest: int | None = length - 1 if isinstance(length, int) else None
        kept = ("id", "root", "max_model_len", "owned_by")
        reported = {key: str(said[key]) for key in kept if said.get(key) is not None}
        place = {"url": self.url} if name is None else {}
        self.identity: Mapping[str, str] = {**place, **reported, **self._version()}

    def encode(self, text: str) -> list[int] | None:
        """Tokenizes by vLLM's /tokenize; None for a server without it.

        Raises BackendError for a temporary failure: nothing is known about its tokens then.
        """
        if not self._tokenizes:
            return None
        try:
            found = self._ask("/tokenize", {"model": self.model, "prompt": text})["tokens"]
            return [int(token) for token in found]
        except BackendError as error:
            if error.kind not in ("failed", "garbled"):
                raise
        except (RequestError, KeyError, TypeError, ValueError):
            pass  # /tokenize is something else there
        self._tokenizes = False
        return None

    def answers(self, samples: Sequence[Sequence[int]], k: int) -> Iterator[tuple[int, Answer]]:
        """Raises UnsupportedError if the server returns no log-probabilities of a prompt."""
        with asyncio.Runner() as runner:
            client = Client(self.url, self._key)
            runner.run(client.__aenter__())
            running: dict[asyncio.Task[Answer], int] = {}
            try:
                yield 0, runner.run(self._settle(client, samples[0], k))
                waiting = iter(range(1, len(samples)))
                while True:
                    while len(running) < self._concurrency:
                        if (index := next(waiting, None)) is None:
                            break
                        asked = self._score(client, self._reader, samples[index], k)
                        running[runner.get_loop().create_task(asked)] = index
                    if not running:
                        return
                    for task in runner.run(_first_done(running)):
                        yield running.pop(task), task.result()
            finally:
                for task in running:
                    task.cancel()
                runner.run(client.__aexit__())

    async def _settle(self, client: Client, ids: Sequence[int], k: int) -> Answer:
        """Returns the first answer, and remembers which reader works for this server."""
        refusals = []
        for name in READERS:
            try:
                answer = await self._score(client, name, ids, k)
            except (NotReturned, RequestError) as error:
                refusals.append(f"{name}: {error}")
            else:
                self._reader = name
                return answer
        raise UnsupportedError(
            f"{self.name}: does not return {k} log-probabilities for each token of a prompt"
            f" ({'; '.join(refusals)}): evaluate the artifact itself, or try a smaller --top-k"
        )

    async def _score(self, client: Client, name: str, ids: Sequence[int], k: int) -> Answer:
        reader = READERS[name]
        fields = {"model": self.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0}
        content = await client.ask("/v1/completions", fields | reader.fields(k, uuid.uuid4().hex))
        try:
            return reader.read(content["choices"][0], ids, k)
        except NotReturned as error:
            if not self._reader:
                raise
            raise BackendError(
                f"{self.name}: left out log-probabilities of a prompt of {len(ids)} tokens"
                f" ({error}), which it gave of others: is it one server, and not several behind one"
                " address?",
                kind="garbled",
            ) from None
        except AnotherTokenizer as error:
            raise ConfigError(
                f"{self.name}: {error}: it has another tokenizer or vocabulary than the reference"
            ) from None
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise BackendError(
                f"{self.name}: its answer is not that of a completion ({error!r})", kind="garbled"
            ) from None

    def _choose(self, wanted: str) -> tuple[str, dict[str, Any]]:
        """Returns the model's name, and what the server reports about it."""
        listed = self._ask("/v1/models")
        try:
            models = {model["id"]: model for model in listed["data"]}
        except (KeyError, TypeError):
            raise ConfigError(f"{self.name}: no server of OpenAI's protocol (/v1/models)") from None
        if wanted in models:
            return wanted, models[wanted]
        if wanted or len(models) != 1:
            problem = f"has no model '{wanted}'" if wanted else "does not have one model"
            names = ", ".join(models) or "none"
            raise ConfigError(f"{self.name}: {problem}; give {self.url}/MODEL, one of: {names}")
        return next(iter(models.items()))

    def _version(self) -> dict[str, str]:
        """Returns the version of vLLM, if the server is one."""
        try:
            return {"version": str(self._ask("/version")["version"])}
        except (BackendError, RequestError, KeyError, TypeError):
            return {}

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        async def asked() -> Any:
            async with Client(self.url, self._key) as client:
                return await client.ask(path, body)

        return asyncio.run(asked())


async def _first_done(tasks: Mapping[asyncio.Task[Answer], int]) -> list[asyncio.Task[Answer]]:
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return sorted(done, key=tasks.__getitem__)
