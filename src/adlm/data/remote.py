"""Downloads: corpora at URLs, and vocabularies, data sets and models of the Hugging Face hub."""

import hashlib
import json
import os
import shutil
import socket
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from adlm.errors import require
from adlm.io.paths import is_url, path_of, write_atomically

# ---- URLs ------------------------------------------------------------------------------------------------------------
# Corpora at URLs of fsspec (s3://, gs://, file://, memory://): fetched once into the cache, then read as files.

INDEX = ".index.json"
"""URL of every fetched file, by its path below the folder."""


def local_copy(text: str, cache: Path, key: str) -> Path:
    """The file or folder that a setting names: a path as it is; for a URL, a copy in the cache. A file whose size has
    not changed is not fetched again."""
    if not is_url(text):
        return path_of(text)
    import fsspec

    try:
        files, root = fsspec.core.url_to_fs(text)
        found = {root: files.info(root)} if files.isfile(root) else files.find(root, detail=True)
        require(bool(found), f"{key}={text!r} holds no file")
        folder = cache / "fetched" / hashlib.sha256(text.encode()).hexdigest()[:16]
        index = {}
        for place, info in sorted(found.items()):
            name = os.path.relpath(place, root) if place != root else place.rstrip("/").rpartition("/")[2]
            target = folder / name
            require(folder in target.resolve().parents, f"{key}={text!r} names a file outside of it: {name!r}")
            index[name] = files.unstrip_protocol(place)
            if not target.is_file() or target.stat().st_size != info["size"]:
                target.parent.mkdir(parents=True, exist_ok=True)
                fetch_file(index[name], target)
        write_atomically(folder / INDEX, json.dumps(index, indent=1))
    except (OSError, ImportError) as error:
        raise ValueError(f"{key}={text!r} cannot be fetched: {error}") from None
    return folder / next(iter(index)) if list(found) == [root] else folder


def url_of(path: Path, cache: Path) -> str:
    """The URL that a file was fetched from; empty for any other file."""
    fetched = cache / "fetched"
    if fetched not in path.parents:
        return ""
    folder = fetched / path.relative_to(fetched).parts[0]
    return json.loads((folder / INDEX).read_text(encoding="utf-8")).get(path.relative_to(folder).as_posix(), "")


def fetch_file(url: str, target: Path) -> None:
    """Download a URL to a file, completely or not at all."""
    import fsspec

    with fsspec.open(url, "rb") as source:
        write_atomically(target, lambda file: shutil.copyfileobj(source, file, 1 << 20))  # type: ignore[arg-type]


# ---- the Hugging Face hub --------------------------------------------------------------------------------------------
# Vocabularies, data sets and models by name. The libraries are imported lazily; errors come at once and in one line.


def fetch(repository: str, files: tuple[str, ...], what: str, advice: str) -> Path:
    """The folder that holds `files` of a hub repository, downloaded unless huggingface_hub already has them."""
    notice_missing_network()
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise ValueError(f"{what} needs huggingface_hub (pip install 'adlm[data]'); or {advice}") from None
    try:
        paths = [hf_hub_download(repository, file) for file in files]
    except Exception as error:
        raise ValueError(f"{what} cannot be fetched from the hub ({_brief(error)}); {advice}") from None
    return Path(paths[0]).parent


MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.bpe")
PICKLES = ("pytorch_model*.bin",)


def fetch_model(repository: str, revision: str, what: str, advice: str) -> Path:
    """The folder of a model repository at a revision (empty: its main branch), downloaded unless huggingface_hub
    already has it: settings, vocabulary and weights, with pickles only if there is nothing else, and no code."""
    notice_missing_network()
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(f"{what} needs huggingface_hub (pip install 'adlm[data]'); or {advice}") from None
    try:
        folder = Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(MODEL_FILES)))
        if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.safetensors.index.json")):
            patterns = [*MODEL_FILES, *PICKLES]
            folder = Path(snapshot_download(repository, revision=revision or None, allow_patterns=patterns))
    except Exception as error:
        raise ValueError(f"{what} cannot be fetched from the hub ({_brief(error)}); {advice}") from None
    return folder


def upload(folder: Path, repository: str, private: bool, what: str, advice: str) -> None:
    """Upload the files of the folder to the repository, which is created if it does not exist."""
    notice_missing_network()
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise ValueError(f"{what} needs huggingface_hub (pip install 'adlm[data]'); or {advice}") from None
    try:
        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(folder))
    except Exception as error:
        raise ValueError(f"{what} cannot be uploaded to the hub ({_brief(error)}); {advice}") from None


def documents(repository: str, config: str, revision: str, split: str, text_key: str, advice: str) -> Iterator[str]:
    """The texts of one split of a hub data set, in its order, read from the memory-mapped cache of `datasets`."""
    what = f"data set {repository!r}"
    notice_missing_network()
    try:
        import datasets
    except ImportError:
        raise ValueError(f"{what} needs the datasets package (pip install 'adlm[data]'); or {advice}") from None
    try:
        table: Any = datasets.load_dataset(repository, config or None, revision=revision or None, split=split)
    except Exception as error:
        raise ValueError(f"{what} cannot be fetched from the hub ({_brief(error)}); {advice}") from None
    columns = list(table.column_names or [])
    if text_key not in columns:
        raise ValueError(f"{what} has no column {text_key!r}; it has {', '.join(columns)}")
    for batch in table.select_columns([text_key]).iter(batch_size=1000):
        yield from batch[text_key]


def _brief(error: Exception) -> str:
    """The kind of failure in a few words: the libraries' messages take paragraphs and name their settings, not ours."""
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return "no network, and not downloaded before"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:100]}" if lines else type(error).__name__


def notice_missing_network() -> None:
    """Switch the libraries to offline mode if no host name resolves: they then use their cache and fail at once on the
    rest. Without it, they retry for half a minute.
    """
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if urllib.request.getproxies():  # a proxy resolves names for us
        return
    try:
        socket.getaddrinfo(urlparse(endpoint).hostname, 443)
    except OSError:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        if constants := sys.modules.get("huggingface_hub.constants"):  # it read the variable at import
            constants.HF_HUB_OFFLINE = True  # pyright: ignore[reportAttributeAccessIssue]
