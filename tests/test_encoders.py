"""The encoders against diffusers' and transformers' own: same numbers, whatever the batch."""

import hashlib
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bake_builders import copy_model, pixels, tiny_model
from diffusers import AutoencoderKL, StableDiffusionPipeline
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import tiny_vae

from precompute.encoders import ImageEncoder, TextEncoder, posterior_noise, to_stored
from precompute.model import open_model
from store_format.errors import PrebakeError

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
SIZE = (48, 64)  # (width, height)
KEYS = [hashlib.sha256(bytes([i])).hexdigest()[:32] for i in range(16)]
PICTURES = [pixels(i, SIZE) for i in range(9)]


def image_encoder(model: Path | None = None, **options: Any) -> ImageEncoder:
    chosen: dict[str, Any] = {"posterior": "mode", "batch_size": 4}
    chosen |= {"compute_dtype": "fp32", "stored_dtype": "fp32"} | options
    encoder = ImageEncoder(open_model(str(model or tiny_model())), device=CPU, **chosen)
    encoder._batch_size = chosen["batch_size"]  # as on a GPU; a CPU takes one image at a time
    return encoder


def text_encoder(model: Path | None = None, **options: Any) -> TextEncoder:
    chosen: dict[str, Any] = {"clip_skip": 1, "compute_dtype": "fp32", "stored_dtype": "fp32"}
    return TextEncoder(open_model(str(model or tiny_model())), device=CPU, **(chosen | options))


@torch.no_grad()
def posterior(model: Path, picture: np.ndarray, batch_size: int = 4) -> Any:
    """Encode one picture by AutoencoderKL.encode, in a batch of equal ones."""
    vae = AutoencoderKL.from_pretrained(model / "vae")
    images = torch.from_numpy(picture).permute(2, 0, 1)[None].to(torch.float32) / 127.5 - 1.0
    return vae.encode(images.expand(batch_size, -1, -1, -1).contiguous()).latent_dist


def one(encoder: ImageEncoder, picture: np.ndarray, key: str = KEYS[0]) -> list[np.ndarray]:
    (tensors,) = encoder.encode([picture], [key])
    assert tensors is not None
    return tensors


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)


def write_vae(model: Path, vae: AutoencoderKL) -> Path:
    shutil.rmtree(model / "vae")
    with torch.random.fork_rng(devices=[]):
        vae.save_pretrained(model / "vae")
    return model


@pytest.fixture(scope="module")
def shifted_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose VAE has a shift, another scale, and neither quant_conv nor post_quant_conv."""
    model = copy_model(tmp_path_factory.mktemp("shifted") / "model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        settings = dict(tiny_vae().config) | {
            "shift_factor": 0.0609, "scaling_factor": 1.5305,
            "use_quant_conv": False, "use_post_quant_conv": False,
        }  # fmt: skip
        return write_vae(model, AutoencoderKL(**settings))


class TestLatents:
    def test_mode_is_the_mean_of_diffusers_times_the_scaling_factor(self) -> None:
        expected = posterior(tiny_model(), PICTURES[0]).mode()[0] * 0.18215  # [C, h, w]
        (latents,) = one(image_encoder(), PICTURES[0])
        assert latents.shape == (4, 8, 6)  # 64 high, 48 wide
        np.testing.assert_allclose(latents, expected.numpy(), rtol=1e-4, atol=1e-6)

    def test_sample_adds_the_noise_of_the_key_times_the_standard_deviation(self) -> None:
        found = posterior(tiny_model(), PICTURES[0])
        seed = int(KEYS[3][:16], 16) % 2**63
        noise = torch.randn((4, 8, 6), generator=torch.Generator().manual_seed(seed))
        expected = (found.mean[0] + found.std[0] * noise) * 0.18215
        (latents,) = one(image_encoder(posterior="sample"), PICTURES[0], KEYS[3])
        np.testing.assert_allclose(latents, expected.numpy(), rtol=1e-4, atol=1e-6)

    def test_moments_are_the_scaled_mean_and_the_scaled_standard_deviation(self) -> None:
        found = posterior(tiny_model(), PICTURES[0])
        mean, std = one(image_encoder(posterior="moments"), PICTURES[0])
        expected = found.mean[0] * 0.18215, found.std[0] * 0.18215
        np.testing.assert_allclose(mean, expected[0].numpy(), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(std, expected[1].numpy(), rtol=1e-5)

    def test_a_shift_is_subtracted_before_scaling_but_not_from_the_deviation(
        self, shifted_model: Path
    ) -> None:
        found = posterior(shifted_model, PICTURES[0])
        assert AutoencoderKL.from_pretrained(shifted_model / "vae").quant_conv is None
        mean, std = one(image_encoder(shifted_model, posterior="moments"), PICTURES[0])
        expected = (found.mean[0] - 0.0609) * 1.5305
        np.testing.assert_allclose(mean, expected.numpy(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(std, (found.std[0] * 1.5305).numpy(), rtol=1e-5)
        (mode,) = one(image_encoder(shifted_model), PICTURES[0])
        np.testing.assert_array_equal(mode, mean)

    def test_noise_is_standard_normal_and_differs_between_keys(self) -> None:
        noise = torch.stack([posterior_noise(key, (4, 64, 64)) for key in KEYS])
        assert noise.dtype == torch.float32
        assert abs(float(noise.mean())) < 0.01
        assert abs(float(noise.std()) - 1) < 0.01
        assert len({bytes(n.numpy()) for n in noise}) == len(KEYS)

    def test_drawing_noise_leaves_the_global_stream_alone(self) -> None:
        before = torch.random.get_rng_state()
        one(image_encoder(posterior="sample"), PICTURES[0])
        assert torch.equal(torch.random.get_rng_state(), before)

    @pytest.mark.parametrize("num_threads", [1, 3])
    def test_bytes_do_not_depend_on_neighbours_or_order(self, num_threads: int) -> None:
        parts = open_model(str(tiny_model()))
        encoder = ImageEncoder(
            parts, posterior="sample", batch_size=4, compute_dtype="fp32", stored_dtype="fp32",
            device=CPU,
        )  # fmt: skip
        pictures = [pixels(i, (80, 64)) for i in range(9)]
        with threads(num_threads):
            alone = [one(encoder, p, k)[0] for p, k in zip(pictures, KEYS, strict=False)]

            @settings(max_examples=4, deadline=None, database=None, phases=[Phase.generate])
            @given(st.permutations(range(len(pictures))), st.integers(2, len(pictures)))
            def check(order: list[int], count: int) -> None:
                chosen = order[:count]
                together = encoder.encode([pictures[i] for i in chosen], [KEYS[i] for i in chosen])
                for i, tensors in zip(chosen, together, strict=True):
                    assert tensors is not None
                    np.testing.assert_array_equal(tensors[0], alone[i], strict=True)

            check()

    @pytest.mark.parametrize("batch_size", [2, 4, 8])
    def test_a_short_batch_is_padded_to_the_fixed_size(self, batch_size: int) -> None:
        """As on a GPU. One thread: more would let the place in the batch matter."""
        encoder = image_encoder(batch_size=batch_size)
        with threads(1):
            full = encoder.encode(PICTURES[:8], KEYS[:8])
            for count in range(1, 8):
                for mine, theirs in zip(
                    encoder.encode(PICTURES[:count], KEYS[:count]), full, strict=False
                ):
                    assert mine is not None
                    assert theirs is not None
                    np.testing.assert_array_equal(mine[0], theirs[0])

    def test_results_are_in_the_order_of_the_pictures(self) -> None:
        (first,) = one(image_encoder(), PICTURES[7])
        results = image_encoder().encode(PICTURES, KEYS[: len(PICTURES)])
        equal = [np.allclose(r[0], first, rtol=1e-4) for r in results if r is not None]
        assert equal == [i == 7 for i in range(len(PICTURES))]

    @pytest.mark.parametrize(
        ("short", "dtype"), [("fp16", np.float16), ("bf16", np.uint16), ("fp32", np.float32)]
    )
    def test_latents_are_rounded_once_to_the_stored_dtype(self, short: str, dtype: Any) -> None:
        (exact,) = one(image_encoder(), PICTURES[0])
        (stored,) = one(image_encoder(stored_dtype=short), PICTURES[0])
        assert stored.dtype == dtype
        if short == "bf16":  # to nearest even: add half of the last place, and cut
            bits = exact.view(np.uint32)
            expected = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        else:
            expected = exact.astype(dtype)
        np.testing.assert_array_equal(stored, expected)

    @pytest.mark.parametrize("dtype", ["fp16", "bf16"])
    def test_half_precision_arithmetic_is_near_to_single(self, dtype: str) -> None:
        (exact,) = one(image_encoder(), PICTURES[0])
        (found,) = one(image_encoder(compute_dtype=dtype), PICTURES[0])
        assert not np.array_equal(found, exact)
        np.testing.assert_allclose(found, exact, atol=0.02)


def make_infinite(encoder: ImageEncoder, bad: set[int], dtypes: set[torch.dtype]) -> list[Any]:
    """Let the VAE return infinity for the batch entries `bad` when it computes in `dtypes`."""
    calls: list[torch.dtype] = []
    real = encoder._vae.encoder

    class Faulty(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.real = real

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            calls.append(images.dtype)
            hidden = self.real(images)
            if images.dtype in dtypes:
                hidden[sorted(bad)] = float("inf")
            return hidden

    encoder._vae.encoder = Faulty()
    return calls


class TestNonFinite:
    def test_an_overflow_in_half_precision_is_encoded_again_in_single(self) -> None:
        exact = image_encoder().encode(PICTURES[:3], KEYS[:3])
        half = image_encoder(compute_dtype="fp16").encode(PICTURES[:3], KEYS[:3])
        encoder = image_encoder(compute_dtype="fp16")
        calls = make_infinite(encoder, {1}, {torch.float16})
        found = encoder.encode(PICTURES[:3], KEYS[:3])
        assert calls == [torch.float16, torch.float32]
        assert encoder.num_retried == 1
        for i, expected in enumerate([half[0], exact[1], half[2]]):
            assert found[i] is not None
            assert expected is not None
            np.testing.assert_allclose(found[i][0], expected[0], atol=1e-3 if i == 1 else 0)

    def test_after_a_retry_the_encoder_computes_in_half_precision_again(self) -> None:
        encoder = image_encoder(compute_dtype="fp16")
        before = one(encoder, PICTURES[2])[0]
        calls = make_infinite(encoder, {0}, {torch.float16})
        one(encoder, PICTURES[0])
        encoder._vae.encoder = encoder._vae.encoder.real
        np.testing.assert_array_equal(one(encoder, PICTURES[2])[0], before)
        assert calls == [torch.float16, torch.float32]

    def test_out_of_memory_in_the_retry_leaves_the_precision_as_it_was(self) -> None:
        encoder = image_encoder(compute_dtype="fp16", batch_size=1)
        encoder._moments = lambda images: raise_out_of_memory(  # type: ignore[method-assign]
            images.dtype == torch.float32, torch.full((1, 8, 8, 6), torch.inf)
        )
        with pytest.raises(PrebakeError, match="out of memory"):
            encoder.encode(PICTURES[:1], KEYS[:1])
        assert encoder._vae.dtype == torch.float16

    @pytest.mark.parametrize("compute_dtype", ["fp32", "fp16", "bf16"])
    def test_what_is_not_finite_in_single_precision_either_is_none(
        self, compute_dtype: str
    ) -> None:
        encoder = image_encoder(compute_dtype=compute_dtype)
        make_infinite(encoder, {0, 2}, {torch.float16, torch.bfloat16, torch.float32})
        found = encoder.encode(PICTURES[:4], KEYS[:4])
        assert [tensors is None for tensors in found] == [True, False, True, False]

    def test_what_overflows_only_when_it_is_stored_is_none(self, tmp_path: Path) -> None:
        model = copy_model(tmp_path / "model")
        vae = AutoencoderKL.from_pretrained(model / "vae")
        vae.register_to_config(scaling_factor=1e7)
        write_vae(model, vae)
        assert image_encoder(model, stored_dtype="fp16").encode(PICTURES[:1], KEYS[:1]) == [None]
        assert image_encoder(model, stored_dtype="bf16").encode(PICTURES[:1], KEYS[:1]) != [None]


def raise_out_of_memory(when: bool, otherwise: torch.Tensor) -> torch.Tensor:
    if when:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    return otherwise


def limit_memory(encoder: ImageEncoder, most: int) -> list[int]:
    """Let the VAE run out of memory when it gets more than `most` images; return batch sizes."""
    sizes: list[int] = []
    real = encoder._moments

    def moments(images: torch.Tensor) -> torch.Tensor:
        sizes.append(len(images))
        return raise_out_of_memory(len(images) > most, real(images))

    encoder._moments = moments  # type: ignore[method-assign]
    return sizes


class TestOutOfMemory:
    def test_the_batch_is_halved_and_nothing_is_lost(self) -> None:
        expected = image_encoder(batch_size=2).encode(PICTURES, KEYS[:9])
        encoder = image_encoder(batch_size=8)
        sizes = limit_memory(encoder, 2)
        found = encoder.encode(PICTURES, KEYS[:9])
        assert sizes == [8, 4, 2, 2, 2, 2, 2]
        assert encoder.notes == [
            "out of memory: images are now encoded 4 at once",
            "out of memory: images are now encoded 2 at once",
        ]
        for mine, theirs in zip(found, expected, strict=True):
            assert mine is not None
            assert theirs is not None
            np.testing.assert_array_equal(mine[0], theirs[0])

    def test_the_smaller_batch_stays(self) -> None:
        encoder = image_encoder(batch_size=4)
        sizes = limit_memory(encoder, 2)
        encoder.encode(PICTURES[:2], KEYS[:2])
        encoder.encode(PICTURES[:2], KEYS[:2])
        assert sizes == [4, 2, 2]

    def test_one_image_that_does_not_fit_is_an_error_that_says_its_size(self) -> None:
        encoder = image_encoder(batch_size=3)
        limit_memory(encoder, 0)
        with pytest.raises(PrebakeError, match=r"one image of 48x64 px on cpu\. Bake at a lower"):
            encoder.encode(PICTURES[:1], KEYS[:1])


@pytest.fixture(scope="module")
def pipeline() -> StableDiffusionPipeline:
    return load_pipeline(tiny_model())


def load_pipeline(model: Path) -> StableDiffusionPipeline:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = StableDiffusionPipeline.from_pretrained(model, safety_checker=None)
    if not hasattr(pipeline.text_encoder, "text_model"):
        # transformers 5 no longer nests the model, and diffusers 0.42 still looks inside
        object.__setattr__(pipeline.text_encoder, "text_model", pipeline.text_encoder)
    return pipeline


CAPTIONS = ["", "a cat", "A  Dog!", "the cat and the dog " * 20, "猫 and naïve ☕", "x"]


def states_of_pipeline(
    pipeline: StableDiffusionPipeline, caption: str, clip_skip: int | None
) -> np.ndarray:
    embeds, _ = pipeline.encode_prompt(caption, "cpu", 1, False, clip_skip=clip_skip)
    return np.asarray(embeds[0].detach().numpy())


class TestText:
    # kohya counts from 1 (the last layer), diffusers from None, then 1 (the last but one).
    @pytest.mark.parametrize(("kohya", "diffusers"), [(1, None), (2, 1), (3, 2)])
    def test_states_are_those_of_the_pipeline(
        self, pipeline: StableDiffusionPipeline, kohya: int, diffusers: int | None
    ) -> None:
        found = text_encoder(clip_skip=kohya).encode(CAPTIONS)
        for caption, text in zip(CAPTIONS, found, strict=True):
            (states,) = text.tensors
            assert states.shape == (77, 32)
            expected = states_of_pipeline(pipeline, caption, diffusers)
            np.testing.assert_allclose(states, expected, rtol=1e-5, atol=1e-6)

    def test_each_clip_skip_gives_other_states(self) -> None:
        states = [text_encoder(clip_skip=n).encode(["a cat"])[0].tensors[0] for n in (1, 2, 3)]
        assert not np.allclose(states[0], states[1], atol=1e-3)
        assert not np.allclose(states[1], states[2], atol=1e-3)

    def test_tokens_are_counted_before_they_are_cut_to_77(
        self, pipeline: StableDiffusionPipeline
    ) -> None:
        long = "cat " * 75
        found = text_encoder().encode(["", "cat dog", long, long + "dog", long + "cat cat"])
        assert [text.num_tokens for text in found] == [2, 4, 77, 78, 79]
        # "cat" and "dog" are single tokens; the 76th word is past the cut
        np.testing.assert_array_equal(found[2].tensors[0], found[3].tensors[0])

    def test_a_mask_is_used_where_the_configuration_asks_for_it(self, tmp_path: Path) -> None:
        model = copy_model(tmp_path / "model")
        settings = (model / "text_encoder/config.json").read_text()
        (model / "text_encoder/config.json").write_text(
            settings.replace("{", '{\n  "use_attention_mask": true,', 1)
        )
        masked = load_pipeline(model)
        (text,) = text_encoder(model).encode(["a cat"])
        expected = states_of_pipeline(masked, "a cat", None)
        np.testing.assert_allclose(text.tensors[0], expected, rtol=1e-5, atol=1e-6)
        (plain,) = text_encoder().encode(["a cat"])
        assert not np.allclose(text.tensors[0], plain.tensors[0], atol=1e-3)

    def test_states_do_not_depend_on_neighbours_or_order(self) -> None:
        encoder = text_encoder()
        captions = [f"cat {i} " * i for i in range(8)]
        alone = [encoder.encode([caption])[0].tensors[0] for caption in captions]
        for order in (captions, captions[::-1], captions[1:], captions[::2]):
            for caption, text in zip(order, encoder.encode(order), strict=True):
                np.testing.assert_array_equal(text.tensors[0], alone[captions.index(caption)])

    @pytest.mark.parametrize(
        ("short", "dtype"), [("fp16", np.float16), ("bf16", np.uint16), ("fp32", np.float32)]
    )
    def test_states_are_rounded_once_to_the_stored_dtype(self, short: str, dtype: Any) -> None:
        exact = torch.from_numpy(text_encoder().encode(["a cat"])[0].tensors[0])
        (stored,) = text_encoder(stored_dtype=short).encode(["a cat"])[0].tensors
        assert stored.dtype == dtype
        np.testing.assert_array_equal(stored, to_stored(exact, short))

    def test_states_that_are_not_finite_are_an_error_that_names_the_caption(self) -> None:
        encoder = text_encoder()
        encoder._hidden_states = lambda ids, mask: torch.full(  # type: ignore[method-assign]
            (1, 77, 32), torch.nan
        )
        with pytest.raises(PrebakeError, match=r"non-finite states for caption 'a cat'"):
            encoder.encode(["a cat"])


class TestLoading:
    def break_tensor(self, file: Path, name: str, tensor: torch.Tensor | None) -> None:
        tensors = load_file(file)
        assert name in tensors
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
        save_file(tensors, file, metadata={"format": "pt"})

    @pytest.mark.parametrize("tensor", [None, torch.zeros(3)], ids=["missing", "misshapen"])
    @pytest.mark.parametrize(
        ("file", "name"),
        [
            ("vae/diffusion_pytorch_model.safetensors", "encoder.mid_block.resnets.0.norm1.weight"),
            ("vae/diffusion_pytorch_model.safetensors", "quant_conv.weight"),
            ("text_encoder/model.safetensors", "encoder.layers.0.layer_norm1.bias"),
        ],
    )
    def test_weights_that_do_not_fit_are_an_error_and_never_made_up(
        self, tmp_path: Path, file: str, name: str, tensor: torch.Tensor | None
    ) -> None:
        model = copy_model(tmp_path / "model")
        self.break_tensor(model / file, name, tensor)
        load = image_encoder if file.startswith("vae") else text_encoder
        with pytest.raises(PrebakeError, match=r"weights do not load as its config\.json says"):
            load(model)

    def test_an_encoder_without_its_decoder_is_enough(self, tmp_path: Path) -> None:
        model = copy_model(tmp_path / "model")
        file = model / "vae/diffusion_pytorch_model.safetensors"
        tensors = load_file(file)
        kept = {k: v for k, v in tensors.items() if k.startswith(("encoder.", "quant_conv."))}
        assert len(kept) < len(tensors)
        save_file(kept, file, metadata={"format": "pt"})
        np.testing.assert_array_equal(
            one(image_encoder(model), PICTURES[0])[0], one(image_encoder(), PICTURES[0])[0]
        )

    @pytest.mark.parametrize("part", ["vae", "text_encoder"])
    def test_a_part_that_does_not_fit_into_memory_is_an_error(
        self, part: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def to(*_: Any) -> None:
            raise_out_of_memory(True, torch.zeros(0))

        kind = {"vae": "AutoencoderKL", "text_encoder": "CLIPTextModel"}[part]
        monkeypatch.setattr(f"precompute.encoders.{kind}.to", to)
        load = image_encoder if part == "vae" else text_encoder
        with pytest.raises(PrebakeError, match=rf"{part} does not fit into the memory of cpu\."):
            load()

    def test_the_decoder_is_not_kept(self) -> None:
        names = {name.split(".")[0] for name, _ in image_encoder()._vae.named_parameters()}
        assert names == {"encoder", "quant_conv"}


def test_a_bake_never_makes_a_unet_nor_reads_its_weights(tmp_path: Path) -> None:
    """diffusers itself imports the U-Net classes; what a bake promises is to make none."""
    model = copy_model(tmp_path / "model")
    for file in (model / "unet").iterdir():
        file.unlink()
    script = f"""
        import re, sys
        sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
        from pathlib import Path
        from bake_builders import draw_set, config
        import torch

        made = set()
        real = torch.nn.Module.__init__
        def note(self, *args, **kwargs):
            made.add(type(self).__name__)
            real(self, *args, **kwargs)
        torch.nn.Module.__init__ = note

        from precompute.bake import bake
        images = draw_set(Path({str(tmp_path / "images")!r}), {{"a.png": "a cat"}})
        out = Path({str(tmp_path / "store")!r})
        bake(config(images, out, model={str(model)!r}), say=lambda line: None)
        assert {{"AutoencoderKL", "CLIPTextModel"}} <= made, made
        assert not [name for name in made if re.fullmatch("UNet.*Model", name)], made
        assert not [name for name in sys.modules if name.split(".")[0] == "train"]
    """
    subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(script)],
        check=True,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)},
    )
