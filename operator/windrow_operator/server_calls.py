"""SGLang's calls for adapters: load, unload, list, and ask whether one answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import aiohttp

from windrow_operator.serving import Instance

# Of an answer: what is read, and what of its error message is repeated.
_MOST_BYTES: Final = 2**20
_MOST_REPEATED: Final = 256
_CANARY_TOKENS: Final = 4
_CANARY_SECONDS: Final = 30.0
# Of a switch: how long the second call follows the first, and how often it is tried.
_BEHIND_SECONDS: Final = 0.02
_SWITCHES: Final = 5

# An instance, and the directory of a version as it sees it.
Target = tuple[Instance, str]


class NotLoaded(Exception):
    """A server did not take an adapter; the message names it and says why."""


class KeyRefused(NotLoaded):
    """A server does not take the key, or asks for one."""


class Servers:
    """SGLang's calls for adapters."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def load_everywhere(self, wanted: Sequence[Target], name: str, *, pinned: bool) -> None:
        """Have a name point to a version in all instances, in their order, or in none.

        A server knows a name once, so another version under it is unloaded first; requests for it
        wait meanwhile (see `_switch`).

        Args:
            wanted: each instance with the directory of the version there.
            name: by which requests ask for it.
            pinned: whether the server keeps it in memory.

        Raises:
            NotLoaded: an instance refuses; the others have what they had.
        """
        changed: list[tuple[Instance, str]] = []  # each with the directory that it had
        try:
            for instance, path in wanted:
                before = (await self._loaded(instance)).get(name)
                if before is not None and before in ("", path):
                    continue  # a server that does not tell directories has what it was given
                changed.append((instance, before or ""))  # before the call: its answer may be lost
                load = self._switch if before else self._load
                await load(instance, name, path, pinned=pinned)
        except NotLoaded:
            for instance, path in reversed(changed):
                with contextlib.suppress(NotLoaded):
                    await self.unload(instance, name)
                    if path:
                        await self._load(instance, name, path, pinned=pinned)
            raise

    async def unload(self, instance: Instance, name: str) -> None:
        """Unload an adapter where it is loaded. Raises NotLoaded when the server does not."""
        if name in await self._loaded(instance):
            await self._call(instance, "unload_lora_adapter", {"lora_name": name})

    async def knows(self, instance: Instance, name: str) -> bool:
        """Return whether an adapter of that name is loaded. Raises NotLoaded: it does not say."""
        return name in await self._loaded(instance)

    async def ask(self, parts: Sequence[Instance], model: str, prompt: str) -> str:
        """Ask for a short completion; return why there is none, "" where there is.

        Args:
            parts: a decode instance, after the prefill instance that computes its prompt, if any.
            model: as a request names it.
            prompt: of the request.

        Raises:
            NotLoaded: what the answer says is not of the model.
        """
        body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": _CANARY_TOKENS}
        if len(parts) > 1:
            host, port = parts[0].bootstrap.split(" ")
            room = secrets.randbits(62)
            body |= {"bootstrap_host": host, "bootstrap_port": int(port), "bootstrap_room": room}
        try:
            async with asyncio.timeout(_CANARY_SECONDS):
                answers = await asyncio.gather(
                    *(self._request("POST", part, "v1/completions", body) for part in parts),
                    return_exceptions=True,
                )
        except TimeoutError as error:
            raise NotLoaded(
                f"{parts[-1].key} does not answer v1/completions within {_CANARY_SECONDS:.0f} s"
            ) from error
        for part, answer in zip(parts, answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            if not answer.get("choices") and part is parts[-1]:
                return f"{part.key} {_said_of(answer)}"
        return ""

    async def _loaded(self, instance: Instance) -> dict[str, str]:
        """Return the names that a server answers by, each with its directory; "": not said."""
        answer = await self._request("GET", instance, "v1/models")
        models = answer.get("data")
        named = models if isinstance(models, list) else ()
        return {
            str(model.get("id")): root if isinstance(root := model.get("root"), str) else ""
            for model in named
            if isinstance(model, dict)
        }

    async def _switch(self, instance: Instance, name: str, path: str, *, pinned: bool) -> None:
        """Have a name that is loaded point to another directory; requests for it wait meanwhile.

        A server changes its adapters one by one, in the order in which it was asked. A request for
        a name that it has just unloaded loads what the name had before, so the new version has to
        be asked for while the old one still leaves: requests that come then wait behind it, and
        get it. Where one came between the two calls the old version is there again, and the switch
        is tried again.

        Raises:
            NotLoaded: the server refuses, or has the old version after each try.
        """
        for _ in range(_SWITCHES):
            leaving = asyncio.create_task(
                self._call(instance, "unload_lora_adapter", {"lora_name": name})
            )
            await self._behind()
            loading = self._load(instance, name, path, pinned=pinned)
            await asyncio.gather(leaving, loading, return_exceptions=True)
            now = (await self._loaded(instance)).get(name)
            if now == path:
                return
            if now is None:  # refused: for good, or because it reached the server first
                await self._load(instance, name, path, pinned=pinned)
                return
        raise NotLoaded(
            f"{instance.key} has the version before under {name} again: requests for it came first"
        )

    async def _behind(self) -> None:
        """Wait until the call that was just sent has most likely reached its server."""
        await asyncio.sleep(_BEHIND_SECONDS)

    async def _load(self, instance: Instance, name: str, path: str, *, pinned: bool) -> None:
        body = {"lora_name": name, "lora_path": path, "pinned": pinned}
        await self._call(instance, "load_lora_adapter", body)

    async def _call(self, instance: Instance, call: str, body: Mapping[str, Any]) -> None:
        answer = await self._request("POST", instance, call, body)
        if answer.get("success") is not True:
            raise NotLoaded(f"{instance.key} refuses{_reason_of(answer)}")

    async def _request(
        self, method: str, instance: Instance, call: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        # The answer is the pod owner's: nothing of it is followed, and little is read or repeated.
        try:
            headers = {"Authorization": f"Bearer {instance.token}"} if instance.token else {}
            async with self._session.request(
                method,
                f"{instance.url}/{call}",
                json=body,
                headers=headers,
                allow_redirects=False,
            ) as response:
                if response.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                    raise KeyRefused(_refused_key(instance, response.status))
                if 300 <= response.status < 400:
                    raise NotLoaded(f"{instance.key} answers {call} with a redirect")
                answer = json.loads(await _read(response.content, instance, call))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise NotLoaded(
                f"{instance.key} does not answer {call}: {type(error).__name__}"
            ) from error
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise NotLoaded(f"{instance.key} does not answer {call} with a JSON object")
        return answer


def _refused_key(instance: Instance, status: int) -> str:
    what = "does not take the key of" if instance.token else "asks for a key: give it by"
    return f"{instance.key} {what} spec.access.serverKeySecret of its policy (HTTP {status})"


async def _read(content: aiohttp.StreamReader, instance: Instance, call: str) -> bytes:
    """Return the body of an answer, which may have so many bytes."""
    read = bytearray()
    async for piece in content.iter_chunked(64 * 1024):
        read += piece
        if len(read) > _MOST_BYTES:
            raise NotLoaded(f"{instance.key} answers {call} with more than {_MOST_BYTES} bytes")
    return bytes(read)


def _reason_of(answer: Mapping[str, Any]) -> str:
    """Return why a server refuses, in its own words: short, and without what is not printed."""
    said = answer.get("error_message")
    if not isinstance(said, str) or not said.strip():
        return " and says no error_message"
    words = " ".join("".join(c if c.isprintable() else " " for c in said[:_MOST_REPEATED]).split())
    return f": {words}{'...' if len(said) > _MOST_REPEATED else ''}"


def probes(instances: Sequence[Instance]) -> list[tuple[Instance, ...]]:
    """Return which instances answer a request together, so that each of them answers one.

    A decode instance that computes no prompts needs a prefill instance; where there is none that
    hands over KV, nothing is asked of it.
    """
    whole = [(each,) for each in instances if each.is_whole]
    prefill = [each for each in instances if each.bootstrap]
    decode = [each for each in instances if each.role == "decode" and not each.is_whole]
    if not prefill or not decode:
        return [*whole]
    rounds = range(max(len(prefill), len(decode)))
    pairs = [(prefill[n % len(prefill)], decode[n % len(decode)]) for n in rounds]
    return [*whole, *pairs]


def _said_of(answer: Mapping[str, Any]) -> str:
    """Return what an answer without a completion says: short, and without what is not printed."""
    error = answer.get("error")
    said = error.get("message") if isinstance(error, Mapping) else answer.get("message")
    return f"answers with an error{_reason_of({'error_message': said})}"
