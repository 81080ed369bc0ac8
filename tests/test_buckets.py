"""Buckets: worked examples, the properties of every plan, and an independent brute force."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precompute.buckets import Geometry, bucket_sizes, choose_geometry, cropped_fraction
from precompute.problems import ImageProblem, Reason
from store_format.errors import PrebakeError

SETTINGS = st.sampled_from([(512, 64), (512, 8), (768, 64), (1024, 64), (1024, 32), (576, 64)])
SIDES = st.integers(1, 5000)


def plan_or_reason(
    width: int, height: int, resolution: int, step: int, *, upscale: bool = False
) -> Geometry | Reason:
    try:
        return choose_geometry(width, height, resolution, step, upscale=upscale)
    except ImageProblem as problem:
        return problem.reason


def test_standard_buckets_of_256_px_in_steps_of_64_by_hand() -> None:
    # Widths 128..512; 256**2 = 65536 over 128 is 512, over 192 341 -> 320, over 256 256, over
    # 320 204 -> 192, over 384 170 -> 128, over 448 146 -> 128, over 512 128; and transposes.
    assert bucket_sizes(256, 64) == (
        (128, 384), (128, 448), (128, 512), (192, 320), (256, 256),
        (320, 192), (384, 128), (448, 128), (512, 128),
    )  # fmt: skip


def test_the_worked_example_of_the_module() -> None:
    geometry = choose_geometry(4000, 3000, 512, 64)
    assert geometry == Geometry(576, 448, 597, 448, 10, 0)
    assert cropped_fraction(geometry) == Fraction(21, 597)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((512, 512), Geometry(512, 512, 512, 512, 0, 0)),
        ((1024, 1024), Geometry(512, 512, 512, 512, 0, 0)),
        ((513, 512), Geometry(512, 512, 513, 512, 0, 0)),  # an odd column goes at the right
        ((515, 512), Geometry(512, 512, 515, 512, 1, 0)),
        ((300, 400), Geometry(256, 384, 300, 400, 22, 8)),  # covers none: its own size, floored
        ((256, 256), Geometry(256, 256, 256, 256, 0, 0)),
        ((300, 5000), Geometry(256, 1024, 256, 4267, 0, 1621)),  # a panorama, on end
        # 768x320 loses 126 of 894 columns, 832x256 loses 42 of 298 rows: the same, so area wins.
        ((900, 322), Geometry(768, 320, 894, 320, 63, 0)),
    ],
)
def test_geometry_at_512_px_by_hand(size: tuple[int, int], expected: Geometry) -> None:
    assert choose_geometry(*size, 512, 64) == expected


def test_a_wide_panorama_is_cropped_to_the_widest_bucket_and_says_how_much() -> None:
    geometry = choose_geometry(5000, 300, 512, 64)
    assert geometry == Geometry(1024, 256, 4267, 256, 1621, 0)  # 5000 * 256 / 300 = 4266.7
    assert cropped_fraction(geometry) == Fraction(4267 - 1024, 4267)


@pytest.mark.parametrize("size", [(255, 512), (5000, 255), (1, 1)])
def test_an_image_under_half_the_resolution_is_too_small(size: tuple[int, int]) -> None:
    with pytest.raises(ImageProblem, match="at least 256 px at resolution 512") as caught:
        choose_geometry(*size, 512, 64)
    assert caught.value.reason is Reason.TOO_SMALL


def test_upscale_enlarges_a_small_image_to_the_standard_bucket_that_crops_least() -> None:
    assert choose_geometry(100, 100, 512, 64, upscale=True) == Geometry(512, 512, 512, 512, 0, 0)
    # 1.29:1 is nearest to 576x448; 200 * 448 / 155 = 578.06.
    assert choose_geometry(200, 155, 512, 64, upscale=True) == Geometry(576, 448, 578, 448, 1, 0)


def test_upscale_does_not_enlarge_what_can_be_baked_at_its_own_size() -> None:
    assert choose_geometry(300, 400, 512, 64, upscale=True) == choose_geometry(300, 400, 512, 64)


@pytest.mark.parametrize(("size", "upscale"), [((20000, 300), False), ((1, 4000), True)])
def test_an_image_of_which_a_sixteenth_would_be_left_is_too_narrow(
    size: tuple[int, int], upscale: bool
) -> None:
    with pytest.raises(ImageProblem, match="under 1/16") as caught:
        choose_geometry(*size, 512, 64, upscale=upscale)
    assert caught.value.reason is Reason.TOO_NARROW


@pytest.mark.parametrize("step", [0, -64, 4, 12, 100])
def test_a_step_that_is_no_multiple_of_8_is_refused(step: int) -> None:
    with pytest.raises(PrebakeError, match=f"bucket step: expected a multiple of 8 .*got {step}"):
        bucket_sizes(512, step)


@pytest.mark.parametrize("resolution", [0, -512, 32, 500, 8256])
def test_a_resolution_off_the_step_or_out_of_range_is_refused(resolution: int) -> None:
    with pytest.raises(PrebakeError, match=f"resolution: expected a multiple .*got {resolution}"):
        choose_geometry(1000, 1000, resolution, 64)


@given(SIDES, SIDES, SETTINGS, st.booleans())
def test_every_plan_keeps_the_promises(
    width: int, height: int, setting: tuple[int, int], upscale: bool
) -> None:
    resolution, step = setting
    plan = plan_or_reason(width, height, resolution, step, upscale=upscale)
    if isinstance(plan, Reason):
        return
    bucket = plan.bucket_width_px, plan.bucket_height_px
    resized = plan.resized_width_px, plan.resized_height_px
    assert bucket[0] % step == 0
    assert bucket[1] % step == 0
    assert bucket[0] * bucket[1] <= resolution**2
    assert resolution // 2 // step * step <= min(bucket)
    assert max(bucket) <= 2 * resolution
    assert 0 <= plan.crop_left_px <= resized[0] - bucket[0]
    assert 0 <= plan.crop_top_px <= resized[1] - bucket[1]
    assert abs(resized[0] - bucket[0] - 2 * plan.crop_left_px) <= 1  # centred
    assert abs(resized[1] - bucket[1] - 2 * plan.crop_top_px) <= 1
    # The aspect ratio holds to the nearest pixel of the side that follows the other.
    error = Fraction(resized[0] * height, width) - resized[1]
    assert abs(error) <= Fraction(1, 2) or abs(error * width / height) <= Fraction(1, 2)
    if not upscale:
        assert resized[0] <= width
        assert resized[1] <= height


@given(SIDES, SIDES, SETTINGS, st.booleans())
def test_the_transposed_image_gets_the_transposed_plan(
    width: int, height: int, setting: tuple[int, int], upscale: bool
) -> None:
    plan = plan_or_reason(width, height, *setting, upscale=upscale)
    transposed = plan_or_reason(height, width, *setting, upscale=upscale)
    if isinstance(plan, Reason):
        assert transposed is plan
    else:
        assert transposed == Geometry(
            plan.bucket_height_px, plan.bucket_width_px,
            plan.resized_height_px, plan.resized_width_px,
            plan.crop_top_px, plan.crop_left_px,
        )  # fmt: skip


@given(st.integers(256, 3000), st.integers(256, 3000))
def test_an_image_that_covers_no_standard_bucket_loses_less_than_a_step_a_side(
    width: int, height: int
) -> None:
    if any(width >= w and height >= h for w, h in bucket_sizes(512, 64)):
        return
    plan = choose_geometry(width, height, 512, 64)
    assert (plan.resized_width_px, plan.resized_height_px) == (width, height)
    assert width - plan.bucket_width_px < 64
    assert height - plan.bucket_height_px < 64


def brute_force(width: int, height: int) -> tuple[int, int] | None:
    """The standard bucket at 512 px, step 64, by trying every size and comparing ratios."""
    sides = range(256, 1025, 64)
    fits = {(w, h) for w in sides for h in sides if w * h <= 512 * 512}
    standard = {b for b in fits if (b[0], b[1] + 64) not in fits}
    standard |= {(h, w) for w, h in standard}
    best = None
    for w, h in sorted(standard):
        if w > width or h > height:
            continue
        scale = max(Fraction(w, width), Fraction(h, height))
        resized = [(2 * side * scale + 1) // 2 for side in (width, height)]
        kept = Fraction(w * h) / (resized[0] * resized[1])
        if best is None or (kept, w * h) > best[0]:
            best = ((kept, w * h), (w, h))
    return best[1] if best else None


@pytest.mark.parametrize("width", range(200, 1400, 37))
def test_the_bucket_is_the_brute_force_one_for_every_size(width: int) -> None:
    for height in range(200, 1400, 13):
        expected = brute_force(width, height)
        plan = plan_or_reason(width, height, 512, 64)
        if expected is not None:
            assert isinstance(plan, Geometry)
            assert (plan.bucket_width_px, plan.bucket_height_px) == expected
        elif min(width, height) < 256:
            assert plan is Reason.TOO_SMALL
