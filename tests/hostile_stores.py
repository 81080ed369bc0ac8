"""Stores changed as a hostile author would: every hash that the change breaks is made right again.

files = StoreFiles(root)
with files.changed({"samples/64x64-0000000a-000001.tar": data}):
    ...  # the commit states size and sha256 of the new bytes
"""

import hashlib
import json
from contextlib import contextmanager, suppress
from pathlib import Path

from store_builders import text_tensors, variant_tensors

from store_format import PrebakeError, open_store
from store_format.verify import store_hash, verify_store

MANIFEST = "prebake.json"


def sealed(body):
    """Return the bytes of a commit with its own hash made right, whatever values are in it."""
    body = {key: value for key, value in body.items() if key != "sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    body["sha256"] = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return json.dumps(body).encode()


def restate(commit, files):
    """Return a commit that states sizes and hashes of `files` as they now are."""
    body = json.loads(commit)
    if MANIFEST in files:
        body["manifest_sha256"] = hashlib.sha256(files[MANIFEST]).hexdigest()
    entries = [segment for segment in body["segments"].values() if segment]
    entries += [file for shard in body["shards"] for file in shard["files"]]
    for entry in entries:
        if files.get(entry["path"]) is not None:
            data = files[entry["path"]]
            entry.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    return sealed(body)


class StoreFiles:
    """The files of a small store in memory, from which it is restored after each change."""

    def __init__(self, root):
        self.root = Path(root)
        self.files = {
            path.relative_to(root).as_posix(): path.read_bytes()
            for path in sorted(self.root.rglob("*"))
            if path.is_file() and path.name != "writer.lock"
        }

    def named(self, *endings):
        """Return the paths that end so."""
        return [path for path in self.files if path.endswith(endings)]

    @property
    def commits(self):
        return [path for path in self.named(".json") if path.startswith("index/")]

    @contextmanager
    def changed(self, files, *, seal=True):
        """Have other bytes in some files (None: no file) while the block runs."""
        files = dict(files)
        if seal:
            for path in self.commits:
                if path not in files:
                    with suppress(KeyError, TypeError):
                        files[path] = restate(self.files[path], files)
        try:
            for path, data in files.items():
                self._put(path, data)
            yield
        finally:
            for path in files:
                self._put(path, self.files.get(path))

    def _put(self, path, data):
        file = self.root / path
        if data is None:
            file.unlink(missing_ok=True)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)


class Truth:
    """What a store must give, from the formula that made it: for each row its tensors' bytes."""

    def __init__(self, root, samples):
        manifest = open_store(root).manifest
        captions = {"", *(caption for sample in samples for caption in sample.captions)}
        rows = [row for sample in samples for row in sample.rows()]
        self.variants = {
            (row.sample_id, row.variant): [t.tobytes() for t in variant_tensors(manifest, row)]
            for row in rows
        }
        self.captions = {row.sample_id: [text.caption for text in row.texts] for row in rows}
        self.texts = {
            text.caption: [t.tobytes() for t in text_tensors(manifest, text.text_key)]
            for row in rows
            for text in row.texts
        }
        key = manifest.empty_text_key
        self.texts[""] = [t.tobytes() for t in text_tensors(manifest, key)]
        assert self.texts.keys() == captions


def use(root, truth, *, always_true):
    """Do all that reads a store, as far as it lets one; return (error or None, findings).

    Asserts that every error is a PrebakeError of one printable line, and that what is read is what
    was written: always, or else wherever `verify --full` finds nothing wrong.
    """
    try:
        store = open_store(root)
    except PrebakeError as error:
        _check_line(str(error))
        with suppress(PrebakeError):
            assert verify_store(root, full=True)
        return error, []
    findings = verify_store(store, full=True)
    for finding in findings:
        _check_line(f"{finding.where}: {finding.what}")
    must_be_true = always_true or not findings
    first = None
    for row in range(len(store)):
        for read in (_check_variant, _check_texts):
            try:
                read(store, row, truth if must_be_true else None)
            except PrebakeError as error:
                _check_line(str(error))
                first = first or error
    try:
        store_hash(store)
        empty = list(store.read_empty_text().values())
        assert not must_be_true or [t.tobytes() for t in empty] == truth.texts[""]
        assert all(text.caption is not None for text in store.index.iter_texts())
    except PrebakeError as error:
        _check_line(str(error))
        first = first or error
    assert findings or first is None, f"verify --full does not find what a read does: {first}"
    return first, findings


def _check_line(message):
    assert message
    assert message.encode("utf-8")
    assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in message), repr(message)


def _check_variant(store, row, truth):
    found = [tensor.tobytes() for tensor in store.read_variant(row).values()]
    sample = store.sample(row)
    if truth:
        assert found == truth.variants[sample.sample_id, sample.variant]


def _check_texts(store, row, truth):
    found = [[t.tobytes() for t in text.values()] for text in store.read_texts(row)]
    sample = store.sample(row)
    if truth:
        captions = [text.caption for text in sample.texts]
        assert captions == truth.captions[sample.sample_id]
        assert found == [truth.texts[caption] for caption in captions]
