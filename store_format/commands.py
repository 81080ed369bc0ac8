"""`prebake store`: look into a store, check it, copy it. Heavy imports wait for the command."""

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import click

from store_format.describe import describe_samples, describe_store
from store_format.wording import counted, size

if TYPE_CHECKING:
    from store_format.manifest import Layout
    from store_format.selection import Part

STORE = click.argument("store", metavar="STORE")
OUT = click.option(
    "--out", required=True, metavar="NEW", help="The new store: a folder, or an s3:// URL."
)
WHERE = "An SQL condition over the index, such as \"source = 'cats' and weight < 1\"."
SHARD_SIZE = click.option(
    "--shard-size-mib",
    type=click.IntRange(1, 4096),
    default=64,
    show_default=True,
    metavar="N",
    help="A shard is closed at this size, in MiB.",
)
LINES_AT_ONCE = 1000


def layout_option(
    required: bool, help: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the option --to."""
    return click.option(
        "--to", type=click.Choice(["zarr", "webdataset"]), required=required, help=help
    )


@click.group()
def store() -> None:
    """Look into a store, check it, mend it, copy it.

    A store is the folder that 'prebake precompute --out STORE' fills. Only gc and repair change it;
    all others work while a bake adds to it: they see its last commit. A STORE may be a URL, such as
    s3://bucket/store, as well.
    """


@store.command()
@STORE
@click.argument("sample", metavar="[SAMPLE_ID_OR_PATH]", required=False)
def inspect(store: str, sample: str | None) -> None:
    """Tell what a store holds, or all about one sample.

    Without a sample: what was baked and how, the buckets, the sources, where the bytes go.
    With the id of a sample, or its path within its source: its picture, its captions, and the file
    and bytes where each of its tensors lies.

    \b
    prebake store inspect stores/cats
    prebake store inspect stores/cats indoors/tom.jpg
    """
    from store_format.store import open_store

    opened = open_store(store)
    lines = describe_store(opened) if sample is None else describe_samples(opened, sample)
    for line in lines:
        click.echo(line)


@store.command()
@STORE
@click.option("--full", is_flag=True, help="Read every byte: hashes, checksums, finite values.")
@click.option("--samples", is_flag=True, help="Name all samples of a damaged shard, not a few.")
@click.pass_context
def verify(context: click.Context, store: str, full: bool, samples: bool) -> None:
    """Check a store; one line for each damage, exit code 1 if there is any.

    The quick check reads the index and looks for every file and its size: seconds even for a large
    store; it finds what was lost or cut short. --full reads everything, as fast as the disk gives
    it, and also finds flipped bytes and values that are not finite. It also says, without calling
    it damage, where the files for plain readers (webdataset, zarr) lag behind the last commit.

    \b
    prebake store verify stores/cats --full
    """
    from store_format.errors import DamagedStoreError
    from store_format.progress import Progress
    from store_format.store import open_store
    from store_format.verify import live_shards, name_samples, verify_store

    start_s = time.monotonic()
    num_bytes, checked, opened = 0, "the index", None
    try:
        opened = open_store(store)
        shards = live_shards(opened)
        num_bytes = sum(file.bytes for shard in shards for file in shard.files)
        checked = (
            f"{counted(len(shards), 'shard')} with {counted(len(opened), 'sample')}, "
            f"{size(num_bytes)}"
        )
    except DamagedStoreError:
        pass  # verify_store finds it again and names it
    if full:
        with Progress(num_bytes, "bytes", f"verifying {store}") as progress:
            findings = verify_store(opened or store, full=True, progress=progress.advance)
    else:
        findings = verify_store(opened or store, full=False)
    damage = [finding for finding in findings if not finding.is_lag]
    for finding in damage:
        concerned = name_samples(opened, finding, all_of_them=samples) if opened else ""
        click.echo(f"{finding}{f' ({concerned})' if concerned else ''}")
    if lagging := sorted({finding.where for finding in findings if finding.is_lag}):
        named = ", ".join(lagging if samples else lagging[:3])
        more = "" if samples or len(lagging) <= 3 else f" and {len(lagging) - 3} more"
        click.echo(
            f"zarr and webdataset would not see the last commit in {named}{more}: a bake is under "
            f"way, or was killed. Let it end, or run it again. (prebake sees it.)"
        )
    if opened is not None and not opened.index.commits and opened.root.names("samples"):
        click.echo(
            f"{store} has shards but no commit: a first bake is under way or was killed, or the "
            f"index is lost. Run the bake again, or bring index/ back from a copy."
        )
    advice = f"{len(damage)} damaged; mend it with 'prebake store repair {store}'"
    result = advice if damage else "nothing is wrong"
    how = "read all of" if full else "looked at"
    click.echo(f"{how} {checked} in {time.monotonic() - start_s:.1f} s: {result}")
    if damage:
        context.exit(1)


@store.command("hash")
@STORE
def hash_store(store: str) -> None:
    """Print one hash of all that a store holds.

    Two stores have the same hash if they hold the same samples with the same tensors: whatever
    their layout, the size of their shards, and the number of runs that wrote them. It reads every
    live byte, checking each.

    \b
    prebake store hash stores/cats
    """
    from store_format.store import open_store
    from store_format.verify import store_hash

    click.echo(store_hash(open_store(store)))


@store.command()
@STORE
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
def gc(store: str, dry_run: bool) -> None:
    """Remove the bytes of a store that no live sample needs.

    A bake only ever adds: superseded latents and captions, dropped samples and the unfinished work
    of killed processes stay until this command is run. Live rows are copied out of shards that
    hold dead ones first. It waits for nobody: while another process reads or writes the store, it
    says so and does nothing.

    \b
    prebake store gc stores/cats --dry-run
    """
    from store_format.garbage import collect_garbage, find_garbage
    from store_format.progress import Progress

    found = find_garbage(store)
    counts = (
        f"{counted(len(found.dead), 'shard')} without live rows, "
        f"{counted(len(found.sample_rows) + len(found.text_rows), 'shard')} with some dead rows, "
        f"{counted(len(found.stray), 'file')} that no commit lists"
    )
    click.echo(f"{counts}: about {size(found.bytes)} of {store}")
    if dry_run or not found:
        return
    num_rows = sum(map(len, (*found.sample_rows.values(), *found.text_rows.values())))
    with Progress(num_rows, "rows", "copying live rows") as progress:
        collect_garbage(store, progress.advance)
    click.echo(f"removed about {size(found.bytes)}, copied {counted(num_rows, 'row')}")


@store.command()
@STORE
@click.argument("url", metavar="URL")
def push(store: str, url: str) -> None:
    """Copy a store to a URL, or what was added to it since the last push.

    Every file is checked against its hash on the way, and counts there only when all that it needs
    is there: whoever reads the URL meanwhile sees a whole store. Interrupted, run it again.

    \b
    prebake store push stores/cats s3://bucket/cats
    """
    _transfer(store, url, is_pull=False)


@store.command()
@click.argument("url", metavar="URL")
@STORE
def pull(url: str, store: str) -> None:
    """Copy a store from a URL to a folder, or what was added to it since the last pull.

    Every file is checked against its hash, those that are there already too. Interrupted, run it
    again.

    \b
    prebake store pull s3://bucket/cats stores/cats
    """
    _transfer(url, store, is_pull=True)


def _transfer(origin: str, target: str, *, is_pull: bool) -> None:
    from store_format import transfer
    from store_format.progress import Progress
    from store_format.store import open_store
    from store_format.verify import live_shards

    shards = live_shards(open_store(origin))
    num_bytes = sum(file.bytes for shard in shards for file in shard.files)
    with Progress(num_bytes, "bytes", f"copying {origin}") as progress:
        run = transfer.pull if is_pull else transfer.push
        done = run(origin, target, progress.advance)
    there = f"; {size(done.num_bytes_there)} were there" if done.num_bytes_there else ""
    click.echo(
        f"{target} holds {counted(done.num_samples, 'sample')}; "
        f"copied {counted(done.num_files, 'file')}, {size(done.num_bytes)}{there}"
    )


@store.command("ls")
@STORE
@click.option("--where", metavar="SQL", help=WHERE)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "csv"]),
    default="table",
    show_default=True,
    help="json: an object a line; csv: the captions as a JSON list.",
)
def list_samples(store: str, where: str | None, form: str) -> None:
    """List the samples of a store, one line each, by source and path.

    \b
    --where takes any SQL condition that DuckDB understands. Its columns:
      source, path, bucket ('512x768'), caption (the first), captions, num_texts,
      weight, tags (tags['artist'] = 'ada'), variant, flipped,
      bucket_width_px, bucket_height_px, original_width_px, original_height_px, ...
      sample_id, image_sha256, latent_key, text_keys (all in hex)

    \b
    prebake store ls stores/cats
    prebake store ls stores/cats --where "bucket = '512x768' and caption like '%sofa%'"
    prebake store ls stores/cats --format json | jq -r .path
    """
    from store_format.listing import list_lines
    from store_format.store import open_store

    lines = list_lines(open_store(store), where, form)
    while some := list(islice(lines, LINES_AT_ONCE)):
        click.echo("\n".join(some))


@store.command()
@STORE
@layout_option(True, "The layout of the new store.")
@OUT
@SHARD_SIZE
def convert(store: str, to: "Layout", out: str, shard_size_mib: int) -> None:
    """Copy a store into another layout, or into shards of another size.

    Nothing is encoded: all arrays are bit-equal, and 'prebake store hash' gives the same for both.
    Interrupted, it is continued by the same command.

    \b
    zarr:       equal captions are kept once; reads as a Zarr v3 hierarchy
    webdataset: tar files, for programs that stream them

    \b
    prebake store convert stores/cats --to webdataset --out stores/cats-tars
    """
    from store_format.selection import Part
    from store_format.store import open_store

    _copy([Part.whole(open_store(store))], out, to, shard_size_mib)


@store.command()
@click.argument("stores", metavar="STORE...", nargs=-1, required=True)
@OUT
@click.option(
    "--rename",
    "renames",
    multiple=True,
    metavar="STORE[:SOURCE]=NAME",
    help="Call the source of a store NAME in the new one; SOURCE is needed if it has several.",
)
@layout_option(False, "The layout of the new store.  [default: that of the first]")
@SHARD_SIZE
def merge(
    stores: tuple[str, ...],
    out: str,
    renames: tuple[str, ...],
    to: "Layout | None",
    shard_size_mib: int,
) -> None:
    """Make one store of several that were baked alike.

    Their configurations must be equal but for the layout. Samples that several stores hold with
    equal content are taken once. Samples of one source name and path with different content are an
    error, before anything is written: are they different pictures, then give one source another
    name. Ids follow from names, so renamed samples are new ones to a training run.

    \b
    prebake store merge stores/cats stores/dogs --out stores/pets
    prebake store merge a/photos b/photos --rename b/photos=more-photos --out stores/photos
    """
    from store_format.selection import Part, parse_renames
    from store_format.store import open_store

    if len(stores) < 2 and not renames:
        raise click.UsageError("name two stores or more to merge.")
    opened = {store: open_store(store) for store in stores}
    names = parse_renames(opened, renames)
    parts = [Part.whole(opened[store], names.get(store)) for store in opened]
    _copy(parts, out, to or parts[0].store.manifest.layout, shard_size_mib)


@store.command()
@STORE
@click.option("--where", required=True, metavar="SQL", help=WHERE)
@OUT
@layout_option(False, "The layout of the new store.  [default: that of STORE]")
@SHARD_SIZE
def subset(store: str, where: str, out: str, to: "Layout | None", shard_size_mib: int) -> None:
    """Copy those samples of a store that a condition selects.

    The condition is SQL, as for 'prebake store ls', which shows what it selects. A sample is copied
    with all its variants when one of them is selected.

    \b
    prebake store subset stores/all --where "source = 'cats'" --out stores/cats
    prebake store subset stores/all --where "bucket == '512x768' and path like 'indoors/%'" \\
        --out stores/tall
    """
    from store_format.selection import Part
    from store_format.sql import select_rows
    from store_format.store import open_store

    opened = open_store(store)
    part = Part(opened, select_rows(opened, where))
    _copy([part], out, to or opened.manifest.layout, shard_size_mib)


def _copy(parts: "Sequence[Part]", out: str, layout: "Layout", shard_size_mib: int) -> None:
    """Copy, and say what was done."""
    from store_format.copying import copy_samples

    start_s = time.monotonic()
    copied = copy_samples(
        parts, out, layout, shard_bytes=shard_size_mib << 20, what=f"writing {out}"
    )
    remarks = ""
    if copied.num_held:
        remarks += f", {copied.num_held} of them since before"
    if copied.num_repeated:
        remarks += f"; {copied.num_repeated} more were equal to one of these"
    seconds = time.monotonic() - start_s
    num_samples = counted(copied.num_samples, "sample")
    click.echo(f"{out}: {num_samples}, layout {layout}, in {seconds:.1f} s{remarks}")
    if copied.num_other_states:
        click.echo(
            f"note: {copied.num_other_states} states of captions were left out: the sources hold "
            f"others of equal keys, as bakes on several devices make them, and one is kept for "
            f"each. So 'prebake store hash' differs.",
            err=True,
        )
