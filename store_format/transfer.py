"""Copying a store as it is, file by file: `push` to a URL, `pull` to a local folder.

The target is at every instant a whole store, or none. Files of shards and of the index come first;
a new store begins to exist with its manifest, which comes last and stands under another name until
then; one that grows sees each commit when all that it needs is there. Views for plain readers
follow. What a killed transfer left is taken over by the next one.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from store_format import zarr_layout
from store_format.commits import (
    COMMIT_FILE,
    INDEX_FOLDER,
    Commit,
    FileEntry,
    ShardEntry,
    parse_commit,
    read_commits,
)
from store_format.connection import ahead
from store_format.errors import DamagedStoreError, NotAStoreError, OtherBakeError, PrebakeError
from store_format.files import sha256_of, write_file
from store_format.folders import NOTE_NAME, Folder, LocalFolder, Location, folder_of, lie_apart
from store_format.locks import LOCK_NAME, STAGING_FOLDER
from store_format.manifest import MANIFEST_NAME, check_same_bake, read_manifest
from store_format.remote import RemoteFolder
from store_format.store import open_store
from store_format.verify import live_shards
from store_format.views import outdated, shards_with_dead_rows, view_files

COMING_NAME = "prebake.json.coming"  # the manifest of a store that is being copied
SHARDS_AHEAD = 3  # are copied at once, beside the one that is waited for
VIEWS_AT_ONCE = 1000  # files that are compared together
_EMPTY_FOLDER_NAMES = {LOCK_NAME, STAGING_FOLDER}


@dataclass(frozen=True)
class Transfer:
    """What a transfer did.

    Attributes:
        num_samples: in the target now.
        num_files: copied.
        num_bytes: copied.
        num_bytes_there: of files of shards that were there before.
    """

    num_samples: int
    num_files: int = 0
    num_bytes: int = 0
    num_bytes_there: int = 0

    def __add__(self, other: "Transfer") -> "Transfer":
        return Transfer(
            self.num_samples,
            self.num_files + other.num_files,
            self.num_bytes + other.num_bytes,
            self.num_bytes_there + other.num_bytes_there,
        )


Progress = Callable[[int], object]


def _silent(num_bytes: int) -> None:
    pass


def push(
    origin: Location | Folder, target: Location | Folder, progress: Progress = _silent
) -> Transfer:
    """Copy a store to another place, or what has been added to it since.

    Files that are there with the stated size are not sent again.

    Args:
        origin: the store.
        target: where it is to be; a store that an earlier `push` made there, or nothing.
        progress: is told the bytes of each live shard (`verify.live_shards`) when it is there.

    Raises:
        NotAStoreError: the origin is no store, or the target something else.
        OtherBakeError: the target holds another bake.
        DamagedStoreError: a live file of the origin differs from the index.
        PrebakeError: the target has commits that the origin does not know.
    """
    return _Transfer(folder_of(origin), folder_of(target), progress, is_pull=False).run()


def pull(
    origin: Location | Folder, target: Location | Folder, progress: Progress = _silent
) -> Transfer:
    """Do as `push` does, and check the hashes of the files that are there already."""
    return _Transfer(folder_of(origin), folder_of(target), progress, is_pull=True).run()


class _Transfer:
    """One transfer of one store."""

    def __init__(
        self, origin: Folder, target: Folder, progress: Progress, *, is_pull: bool
    ) -> None:
        """Open the origin, whose `gc` removes nothing as long as this lives, and check the target.

        Raises: what `push` does, but for damage of shards.
        """
        self._origin = origin
        self._target = target
        self._progress = progress
        self._checks_hashes = is_pull and isinstance(target, LocalFolder)
        self._store = open_store(origin)
        self._manifest = origin.read(MANIFEST_NAME)
        self._live = live_shards(self._store)
        names = set(target.names())
        known = target.sizes([COMING_NAME, MANIFEST_NAME])  # in this order: another may be pushing
        self._is_new = MANIFEST_NAME not in known
        self._check_target(names | set(known))
        self._commits = self._missing_commits()

    def run(self) -> Transfer:
        """Copy what is missing."""
        claim = self._target.claim(secrets.token_hex(4))
        self._staging = claim.staging
        try:
            if self._is_new:
                self._create_once(COMING_NAME)
                self._target.make_folder(INDEX_FOLDER)
            done = Transfer(len(self._store))
            done += self._copy_shards()
            done += self._copy_segments()
            done += self._copy_commits()
            if self._is_new:
                self._create_once(MANIFEST_NAME)
            self._target.remove([COMING_NAME], self._staging)
            self._check_commits()
            self._write_views()
        finally:
            claim.release()
        return done

    # What may be copied where.

    def _check_target(self, names: set[str]) -> None:
        """Raise unless the target, with these names, is apart, and holds this bake, or nothing."""
        if not lie_apart(self._origin, self._target):
            raise PrebakeError(
                f"{self._target} and {self._origin} are the same, or one lies in the other. "
                f"Choose a place of its own."
            )
        if self._origin.sizes([NOTE_NAME]):
            raise DamagedStoreError(
                f"{self._origin} has lost a part of its index. Run 'prebake store repair' first."
            )
        name = MANIFEST_NAME
        if self._is_new:
            is_file = isinstance(self._target, LocalFolder) and self._target.path.is_file()
            if names <= _EMPTY_FOLDER_NAMES and not is_file:
                return
            if COMING_NAME not in names:
                raise NotAStoreError(
                    f"{self._target} is not empty and not a prebake store. Choose a place that "
                    f"does not exist yet."
                )
            name = COMING_NAME
        if self._target.read(name) != self._manifest:
            if not self._is_new:
                check_same_bake(self._target, read_manifest(self._target), self._store.manifest)
            raise OtherBakeError(
                f"{self._target} holds another bake than {self._origin}. Choose another place."
            )

    def _missing_commits(self) -> list[Commit]:
        """Return the commits that the target lacks, in order."""
        names = [n for n in self._target.names(INDEX_FOLDER) if COMMIT_FILE.fullmatch(n)]
        there = {name.removesuffix(".json") for name in names}
        counting = there if self._is_new else {c.name for c in read_commits(self._target)}
        commits = self._store.index.commits
        known = {name for commit in commits for name in (commit.name, *commit.replaces)}
        if foreign := sorted(counting - known):
            raise PrebakeError(
                f"{self._target} holds commit {foreign[0]}, which {self._origin} does not know: "
                f"another store was copied there, or added to there. Choose another place, or "
                f"bring both together in a third with 'prebake store merge'."
            )
        return [commit for commit in commits if commit.name not in there]

    def _check_commits(self) -> None:
        """Raise unless the target now has the commits of the origin, and no others."""
        found = {commit.name for commit in read_commits(self._target)}
        if other := sorted(found ^ {commit.name for commit in self._store.index.commits}):
            raise PrebakeError(
                f"{self._target}: commit {other[0]} came or went while the store was copied. "
                f"Another process writes there; wait for its end, then run the same command again."
            )

    # Shards.

    def _copy_shards(self) -> Transfer:
        shards = [*self._live, *self._passing_shards()]
        self._sizes = self._target.sizes([file.path for shard in shards for file in shard.files])
        done = Transfer(0)
        for shard, copied in zip(shards, ahead(self._copy, shards, SHARDS_AHEAD), strict=True):
            done += copied
            if shard.name in self._live_names:
                self._progress(sum(file.bytes for file in shard.files))
        self._check_sizes([file for shard in self._live for file in shard.files])
        return done

    @cached_property
    def _live_names(self) -> set[str]:
        return {shard.name for shard in self._live}

    def _passing_shards(self) -> list[ShardEntry]:
        """Return shards without live rows that a reader meets all the same.

        A store that grows by several commits is for a moment as each of them left it.
        """
        if self._is_new:
            return []
        passing = [shard for commit in self._commits[:-1] for shard in commit.shards]
        return [shard for shard in passing if shard.name not in self._live_names]

    def _copy(self, shard: ShardEntry) -> Transfer:
        """Copy those files of a shard that are missing or have another size."""
        missing = [file for file in shard.files if not self._is_there(file, self._sizes)]
        missing_bytes = sum(file.bytes for file in missing)
        all_bytes = sum(file.bytes for file in shard.files)
        try:
            is_zarr = self._store.manifest.layout == "zarr"
            if is_zarr and missing and not any(file.path in self._sizes for file in shard.files):
                self._copy_zarr_shard(shard)
            else:
                for file in missing:
                    self._copy_file(file, self._sizes)
        except DamagedStoreError:
            if shard.name in self._live_names:
                raise
            return Transfer(0)  # its rows are dead, in the origin for long
        return Transfer(0, len(missing), missing_bytes, all_bytes - missing_bytes)

    def _copy_zarr_shard(self, shard: ShardEntry) -> None:
        """Copy a whole shard at once."""
        staged = self._staging / shard.name.replace("/", "-")
        for file in shard.files:
            self._fetch(file, staged / file.path.removeprefix(f"{shard.name}/"))
        for path, data in self._first_view(shard).items():
            view = staged / path.removeprefix(f"{shard.name}/")
            view.parent.mkdir(parents=True, exist_ok=True)
            view.write_bytes(data)
        try:
            self._target.publish(staged, shard.name)
        except FileExistsError:  # another transfer of the same store is at work
            self._check_sizes(shard.files)

    def _first_view(self, shard: ShardEntry) -> dict[str, bytes]:
        """Return the view with which a shard is published: no row is live without its commit."""
        if self._is_new and shard.name in self._views:
            return self._views[shard.name]
        if shard.kind == "texts":
            return {}
        nothing = np.zeros(shard.rows, np.bool_), np.zeros((shard.rows, 1, 16), np.uint8)
        return zarr_layout.view_files(shard.name, *nothing)

    def _check_sizes(self, files: Sequence[FileEntry]) -> None:
        """Raise unless the target has the files with their sizes."""
        sizes = self._target.sizes([file.path for file in files])
        for file in files:
            if sizes.get(file.path) != file.bytes:
                raise DamagedStoreError(
                    f"{self._target.at(file.path)} has {sizes.get(file.path, 'no')} bytes after it "
                    f"was copied, expected {file.bytes}. Run the same command again."
                )

    # The index, and what follows from it.

    def _copy_segments(self) -> Transfer:
        files = [segment for commit in self._commits for segment in commit.segments.all()]
        sizes = self._target.sizes([file.path for file in files])
        missing = [file for file in files if not self._is_there(file, sizes)]
        for file in missing:
            self._copy_file(file, sizes)
        return Transfer(0, len(missing), sum(file.bytes for file in missing))

    def _copy_commits(self) -> Transfer:
        done = Transfer(0)
        for commit in self._commits:
            path = f"{INDEX_FOLDER}/{commit.name}.json"
            data = self._origin.read(path)
            parse_commit(data, self._origin.at(path))
            staged = self._staging / f"{commit.name}.json"
            write_file(staged, data)
            self._publish(staged, path, len(data))
            done += Transfer(0, 1, len(data))
        return done

    @cached_property
    def _views(self) -> dict[str, dict[str, bytes]]:
        """The view files of each live shard, or of the list of shards."""
        views = view_files(self._store.manifest, self._store.index)
        if self._store.manifest.layout == "webdataset":
            is_whole = not shards_with_dead_rows(self._store.index)
            return dict(views) if is_whole else {}
        return {name: files for name, files in views if name in self._live_names}

    def _write_views(self) -> None:
        """Bring what plain readers see to the last commit."""
        files = [item for view in self._views.values() for item in view.items()]
        if self._store.manifest.layout == "zarr":
            groups = {path for shard in self._live for path in zarr_layout.group_files(shard.name)}
            files += [(path, zarr_layout.group_json()) for path in sorted(groups)]
        for start in range(0, len(files), VIEWS_AT_ONCE):
            part = dict(files[start : start + VIEWS_AT_ONCE])
            for path in outdated(self._target, part):
                self._target.replace(path, part[path], self._staging)

    # Files.

    def _is_there(self, file: FileEntry, sizes: dict[str, int]) -> bool:
        if sizes.get(file.path) != file.bytes:
            return False
        if not self._checks_hashes:
            return True
        assert isinstance(self._target, LocalFolder)
        return sha256_of(self._target.path / file.path) == file.sha256

    def _copy_file(self, file: FileEntry, sizes: dict[str, int]) -> None:
        """Copy one file, in the place of a wrong one if there is one."""
        staged = self._staging / file.path.replace("/", "-")
        self._fetch(file, staged)
        if file.path in sizes:
            removed = self._staging / f"removed-{staged.name}"
            removed.mkdir()
            self._target.remove([file.path], removed)
        self._publish(staged, file.path, file.bytes)

    def _fetch(self, file: FileEntry, to: Path) -> None:
        """Bring the right bytes of a file of the origin to a local one, or raise."""
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._fetch_bytes(file, to)
        except FileNotFoundError:
            raise DamagedStoreError(
                f"{self._origin.at(file.path)} is missing. The store is damaged; run 'prebake "
                f"store verify {self._origin}'."
            ) from None
        if self._target.is_local:
            with to.open("rb") as copy:
                os.fsync(copy.fileno())

    def _fetch_bytes(self, file: FileEntry, to: Path) -> None:
        if isinstance(self._origin, RemoteFolder):
            self._origin.download(file.path, file.bytes, file.sha256, to)
            return
        assert isinstance(self._origin, LocalFolder)
        path = self._origin.path / file.path
        if self._target.is_local:
            shutil.copyfile(path, to)
        else:
            to.symlink_to(path.absolute())  # sent from where it is
        if (found := sha256_of(to)) != file.sha256:
            raise DamagedStoreError(
                f"{path}: sha256 differs from the index (found {found[:8]}..., expected "
                f"{file.sha256[:8]}...). The store is damaged; run 'prebake store verify "
                f"{self._origin}'."
            )

    def _publish(self, staged: Path, path: str, size_bytes: int) -> None:
        """Put a file at its place; another transfer of the same store may be doing so too."""
        try:
            self._target.publish(staged, path)
        except FileExistsError:
            if self._target.sizes([path]) != {path: size_bytes}:
                raise

    def _create_once(self, path: str) -> None:
        """Put the manifest at `path`, unless it is there."""
        try:
            self._target.create(path, self._manifest, self._staging)
        except FileExistsError:
            if self._target.read(path) != self._manifest:
                raise OtherBakeError(
                    f"{self._target} was given another bake at the same time. Choose another place."
                ) from None
