"""Where results go, and whether they are there already."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from moegeom.checkpoint.remote.url import scheme_of
from moegeom.core.digest import digest_of
from moegeom.core.errors import UsageError
from moegeom.core.files import is_there
from moegeom.core.loaded_code import lies_in, trees_around
from moegeom.core.router import RouterSet
from moegeom.core.text import number_of
from moegeom.engine.request import ScanRequest, TokensRequest, tokens_path
from moegeom.engine.run_facts import asked_facts, plan_facts
from moegeom.results.plans import differing_parts
from moegeom.results.reader import is_results, open_results
from moegeom.tokens.files import TokenFiles, paths_of

#: Where results go that nobody names a folder for.
RUNS = Path("runs")


def default_out(request: ScanRequest, plan: Mapping[str, Any]) -> Path:
    """A folder in ``runs`` that is the same for the same request and for no other.

    Named after the checkpoint and its folder, the tokens, and a hash of the plan.
    """
    path = tokens_path(request.tokens)
    tokens = "" if path is None else f"-on-{_stem(path, 1)}"
    digest = digest_of(json.dumps(plan, sort_keys=True))[:6]
    return RUNS / f"{_stem(request.checkpoint, 2)}{tokens}-{digest}.{request.ENDING}"


def early_out(request: ScanRequest, fingerprint: str) -> Path | None:
    """Where results on traces of many files go, which must be known before they are read; None for
    other tokens.

    Without ``request.out`` it is a folder in ``runs`` named as by :func:`default_out`, after what
    was asked of which files instead of what they hold.
    """
    tokens = request.tokens
    if not isinstance(tokens, str | TokenFiles):
        return None
    paths = paths_of(tokens)
    is_folder = paths[0].is_dir() and not (paths[0] / "recording.json").exists()
    if len(paths) == 1 and not is_folder:
        return None
    if request.out is not None:
        return request.out
    return default_out(request, asked_facts(request, fingerprint))


def _stem(target: str, num_parts: int) -> str:
    """The last parts of a path or URL, as part of a file name."""
    is_url = "://" in target
    path = PurePosixPath(target.partition("://")[2]) if is_url else Path(target).resolve()
    if not is_url and Path(target).is_file():
        path = path.with_suffix("")
    named = "-".join(part for part in path.parts[-num_parts:] if part != path.anchor)
    return re.sub(r"[^A-Za-z0-9._-]+", "_", named)[-80:].lstrip(".-") or "model"


def believes_results(request: TokensRequest, out: Path) -> bool:
    """Whether results that lie at ``out`` may answer this request, or be gone on with.

    Not in the working tree of what is judged: who wrote the checkpoint could have written them.
    """
    tokens = request.tokens
    paths = paths_of(tokens) if isinstance(tokens, str | TokenFiles) else ()
    files = [path for path in paths if path.is_file()]
    judged = [path for path in paths if not path.is_file()]
    if not scheme_of(request.checkpoint):
        judged.append(Path(request.checkpoint))
    trees = {tree for _, tree in trees_around(*judged)}
    # what lies beside a single file is not of it, unless a working tree says so
    trees |= {tree for folder, tree in trees_around(*files) if tree != folder}
    return not any(lies_in(out, tree) for tree in trees)


def is_answered(out: Path, plan: Mapping[str, Any], request: ScanRequest) -> bool:
    """True when ``out`` holds the results of this request, so that nothing need be measured.

    Raises
    ------
    UsageError
        When something else is there and may not be replaced: other results without ``overwrite``,
        or what are no results at all.
    """
    if request.overwrite or not is_there(out):
        return False
    run = open_results(out).run if is_results(out) else {}
    before = run.get("plan")
    if not isinstance(before, dict):
        raise UsageError(f"{out} exists already and holds no results.", "Choose another --out.")
    differing = differing_parts(before, json.loads(json.dumps(plan)))
    if differing:
        raise UsageError(
            f"{out} holds the results of another request: {', '.join(differing)} differ.",
            "Choose another --out, or replace them with --overwrite.",
        )
    refuse_skipped(request, run.get("parts", {}), f"the results at {out}", "use --overwrite")
    return True


def is_answered_unread(
    out: Path,
    request: ScanRequest,
    routers: RouterSet,
    columns: Mapping[str, str],
    taken: Collection[str] = ("tokens",),
) -> bool:
    """True when ``out`` holds the results of this request, as far as that is known before its
    tokens are read; what cannot be told so is told when they are.

    ``taken`` are parts of the plan that those results may say themselves: what ``tokens`` hold,
    which follows from which files they are; which ``token_files`` they were, where these are gone;
    the ``device``, where one answers for another.
    """
    before = open_results(out).run.get("plan") if is_results(out) else None
    if not isinstance(before, dict):
        return False
    here = replace(request, tokens=None) if "token_files" in taken else request
    plan = plan_facts(here, routers, None, "cpu", columns)
    options = before.get("options")
    for part in taken:
        if part == "device":
            plan["options"][part] = options.get(part) if isinstance(options, dict) else None
        else:
            plan[part] = before.get(part)
    try:
        return is_answered(out, plan, request)
    except UsageError:
        return False


def refuse_skipped(
    request: ScanRequest, parts: Mapping[str, Mapping[str, Any]], what: str, instead: str
) -> None:
    """Raises UsageError when routers were measured without tokens that this request must refuse."""
    for router, facts in parts.items():
        if not request.skips_non_finite and (skipped := facts.get("num_non_finite")):
            raise UsageError(
                f"{what} skipped {number_of(skipped, 'token')} of router {router} that are not "
                "finite.",
                f"Go on with --non-finite skip, or {instead}.",
            )
