"""Models of the Hugging Face hub: ``hf://owner/name``, ``hf://owner/name@revision/folder``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, NoReturn
from urllib.parse import unquote

from moegeom.checkpoint.folder import Location
from moegeom.checkpoint.remote.folder import RemoteFolder
from moegeom.checkpoint.remote.http import PASSING, HttpTransport, Refusals, retry_after
from moegeom.checkpoint.remote.options import RemoteOptions
from moegeom.checkpoint.remote.transport import Stamp, TryAgain, with_retries
from moegeom.checkpoint.remote.url import cut
from moegeom.core.errors import CheckpointError

#: ``refs/pr/1`` and ``refs/convert/...`` are revisions with slashes; a branch's are written %2F.
_HUB_URL = re.compile(
    r"hf://(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(?P<path>/.*)?",
    re.DOTALL,
)

_LOG_IN = "Is the model gated or private? Accept its terms on its page, then run: hf auth login"

_REFUSALS = Refusals(denied=_LOG_IN, missing="Check the name of the model and the revision.")


@dataclass(frozen=True)
class HubAddress:
    """A model, one of its revisions ("" for the main one), and a path in it ("" for all)."""

    repo: str
    revision: str
    path: str

    @property
    def label(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


class _PinnedTransport(HttpTransport):
    """Files of one commit, whose versions the listing tells: a CDN has ETags of its own."""

    def probe(self, name: str, size: int) -> tuple[Stamp, bytes]:
        stamp, raw = super().probe(name, size)
        return _only_size(stamp), raw

    def read(self, name: str, offset: int, size: int) -> tuple[bytes, Stamp]:
        raw, stamp = super().read(name, offset, size)
        return raw, _only_size(stamp)


def _only_size(stamp: Stamp) -> Stamp:
    return replace(stamp, etag="", modified="")


def parse_hub_url(url: str) -> HubAddress:
    """The parts of an ``hf://`` URL of a model."""
    match = _HUB_URL.fullmatch(url)
    if match is None or match["repo"].startswith(("datasets/", "spaces/")):
        raise CheckpointError(
            f"{cut(url)}: is no address of a model, expected hf://owner/name, "
            "hf://owner/name@revision or a folder or file in it."
        )
    path = (match["path"] or "").strip("/")
    return HubAddress(match["repo"], unquote(match["revision"] or ""), path)


def open_hub(url: str, options: RemoteOptions) -> Location:
    """A folder of a model, or one file of it, at the commit that the hub names now."""
    from huggingface_hub import HfApi, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    address = parse_hub_url(url)
    api = HfApi(endpoint=options.hub_endpoint, token=options.hub_token)
    commit, files = _list(api, address, options)
    path = address.path
    folder, _, file = path.rpartition("/") if path in files else (path, "", "")
    prefix = f"{folder}/" if folder else ""
    inside = {n.removeprefix(prefix): s for n, s in files.items() if n.startswith(prefix)}
    if not inside:
        raise CheckpointError(
            f"{address.label}: holds no folder or file {path!r} at commit {commit[:12]}.",
            "Check the path in the model.",
        )

    def at(name: str) -> str:
        return hf_hub_url(address.repo, prefix + name, revision=commit, endpoint=api.endpoint)

    transport = _PinnedTransport(at, options, build_hf_headers(token=options.hub_token), _REFUSALS)
    return Location(RemoteFolder(address.label, transport, options, inside, commit), file or None)


def _list(api: Any, address: HubAddress, options: RemoteOptions) -> tuple[str, dict[str, Stamp]]:
    """The commit, and size and object id of every file; one request."""
    info = with_retries(lambda: _ask(api, address, options), f"hf://{address.label}", options)
    if not isinstance(info.sha, str) or not info.siblings:
        raise CheckpointError(f"hf://{address.label}: the hub lists no commit or no file.")
    files = {}
    for sibling in info.siblings:
        if type(sibling.size) is not int or sibling.size < 0:
            raise CheckpointError(f"hf://{address.label}: {sibling.rfilename} has no size.")
        oid = (sibling.lfs.sha256 if sibling.lfs else sibling.blob_id) or ""
        files[sibling.rfilename] = Stamp(sibling.size, oid)
    return info.sha, files


def _ask(api: Any, address: HubAddress, options: RemoteOptions) -> Any:
    from httpx2 import HTTPError
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        return api.model_info(
            address.repo,
            revision=address.revision or None,
            files_metadata=True,
            timeout=options.timeout_s,
        )
    except HfHubHTTPError as error:
        _refuse(error, address)
    except HFValidationError:
        raise CheckpointError(f"hf://{address.label}: is no name of a model.") from None
    except OfflineModeIsEnabled:
        raise CheckpointError(
            f"hf://{address.label}: cannot be read, huggingface_hub is in offline mode.",
            "Unset HF_HUB_OFFLINE.",
        ) from None
    except HTTPError as error:
        raise TryAgain(f"cannot be reached ({type(error).__name__})") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError(
            f"hf://{address.label}: the hub answers with a description that makes no sense.",
            "Is HF_ENDPOINT the address of a hub?",
        ) from None


def _refuse(error: Any, address: HubAddress) -> NoReturn:
    """What a status of the hub means; it answers 401 for models that do not exist, too."""
    status = error.response.status_code
    if status in PASSING:
        wait = retry_after(error.response.headers.get("Retry-After", ""))
        raise TryAgain(f"answers {status}", wait) from None
    hint = _LOG_IN if status in (401, 403) else _REFUSALS.missing
    kind = type(error).__name__.removesuffix("Error")
    raise CheckpointError(f"hf://{address.label} answers {status} ({kind}).", hint) from None
