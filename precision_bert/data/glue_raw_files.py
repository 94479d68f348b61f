"""Tells before a download is tried whether tfds can get a GLUE task's raw files."""

from __future__ import annotations

import contextlib
import shlex
import socket
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from precision_bert.data.glue_tasks import GlueTask

CONNECT_TIMEOUT_S = 4.0


def check_obtainable(task: GlueTask, builder: Any) -> None:
    """Returns if every raw file of `task` is on disk or on a host that can be reached.

    Use it before `builder.download_and_prepare()`, which retries for minutes where there is no
    network, and then reports a host and not what to do.

    Args:
        task: The task.
        builder: Its tfds builder, which knows the folder and the registered URLs.

    Raises:
        FileNotFoundError: If a file is missing and its host cannot be reached. The message names
            the missing files, where each comes from, the folder to put them in and the command.
    """
    downloads = Path(builder.data_dir_root) / "downloads"
    urls = _registered_urls(task, builder)
    missing = {
        name: url for name, url in urls.items() if not _is_on_disk(name, url, downloads, builder)
    }
    if not missing:
        return
    unreachable = _unreachable(sorted({_server_to_ask(url) for url in missing.values()}))
    if not unreachable:
        return
    manual = downloads / "manual"
    command = (
        f'import tensorflow_datasets as tfds; tfds.load("glue/{task.name}", '
        f'data_dir="{builder.data_dir_root}")'
    )
    wanted = "\n".join(f"  {name}  from {url}" for name, url in missing.items())
    raise FileNotFoundError(
        f"glue/{task.name} is not prepared in {str(builder.data_dir_root)!r}, {len(missing)} of "
        f"its {len(urls)} raw files are not there, and no connection could be opened within "
        f"{CONNECT_TIMEOUT_S:g} s to {', '.join(unreachable)}. Wanted:\n"
        f"{wanted}\n"
        "Fetch them on a machine with network, put them unchanged and under these names in\n"
        f"  {manual}\n"
        "and call load_glue again, or prepare the set yourself:\n"
        f"  mkdir -p {shlex.quote(str(manual))} && cp {' '.join(missing)} "
        f"{shlex.quote(str(manual))}\n"
        f"  python -c {shlex.quote(command)}"
    )


def _registered_urls(task: GlueTask, builder: Any) -> dict[str, str]:
    """The URL of each raw file, by the file name that tfds registers with it."""
    by_name = {info.filename: url for url, info in builder.url_infos.items()}
    unknown = [name for name in task.raw_files if name not in by_name]
    if unknown:
        raise FileNotFoundError(
            f"The installed tensorflow_datasets registers no file {', '.join(unknown)} for "
            f"glue/{task.name}. Registered: {', '.join(sorted(by_name))}. This release of "
            "precision_bert was written for tensorflow_datasets 4.9.10; prepare the task with "
            "tfds.load first, and load_glue will read it."
        )
    return {name: by_name[name] for name in task.raw_files}


def _is_on_disk(name: str, url: str, downloads: Path, builder: Any) -> bool:
    if (downloads / "manual" / name).is_file():
        return True
    # tfds names a cached download after its URL and hash, with the original name and the URL in a
    # JSON file beside it. Its own search is private to its download manager.
    import tensorflow_datasets as tfds

    checksum = builder.url_infos[url].checksum
    cached = tfds.core.download.resource.get_dl_fname(url, checksum)
    folders = (downloads / builder.name, downloads)  # today's place, and that of older releases
    return any(
        (folder / cached).is_file() and (folder / f"{cached}.INFO").is_file() for folder in folders
    )


def _server_to_ask(url: str) -> tuple[str, int]:
    """The host and port that a download of `url` connects to: a proxy's, where there is one."""
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(host):
        parts = urllib.parse.urlsplit(proxy if "//" in proxy else f"//{proxy}")
        return parts.hostname or host, parts.port or 80
    return host, parts.port or 443


def _unreachable(servers: list[tuple[str, int]]) -> list[str]:
    """The hosts to which no connection is opened within the time limit."""
    reached: set[tuple[str, int]] = set()

    def connect(server: tuple[str, int]) -> None:
        # An OSError says that there is no address, no route or no answer: not reached.
        with contextlib.suppress(OSError), socket.create_connection(server, CONNECT_TIMEOUT_S):
            reached.add(server)

    # Looking up an address has no time limit of its own and may block for a minute; as daemons,
    # threads that still wait for one hold up neither this call nor the end of the process.
    threads = [threading.Thread(target=connect, args=(item,), daemon=True) for item in servers]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [server[0] for server in servers if server not in reached]
