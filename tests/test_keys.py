"""Ids and keys against SHA-256 of JSON written out by hand (FORMAT.md, sections 1, 2 and 8)."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store_format.keys import canonical_json, hash16, latent_key, sample_id, text_key

TEXT = {
    "encoders": [("aa", "bb")],
    "max_token_length": 77,
    "clip_skip": 1,
    "compute_dtype": "float32",
    "stored_dtype": "float16",
}
LATENT = {
    "decode_rules": 1,
    "bucket": (64, 48),
    "resized": (70, 48),
    "crop": (3, 0),
    "flipped": False,
    "background": (255, 255, 255),
    "vae": "cc",
    "scaling_factor": 0.18215,
    "shift_factor": 0.0,
    "posterior": "sample",
    "compute_dtype": "float32",
    "stored_dtype": "float16",
}


def first_16_bytes(text):
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]


def test_a_sample_id_is_the_hash_of_this_json():
    assert sample_id("cats", "d1/ü.png") == first_16_bytes('["prebake.sample",1,"cats","d1/ü.png"]')


def test_a_text_key_is_the_hash_of_this_json():
    assert text_key('a "cat"\n', **TEXT) == first_16_bytes(
        '{"caption":"a \\"cat\\"\\n","clip_skip":1,"compute_dtype":"float32",'
        '"encoders":[["aa","bb"]],"kind":"prebake.text","max_token_length":77,'
        '"stored_dtype":"float16","version":1}'
    )


def test_a_latent_key_is_the_hash_of_this_json():
    assert latent_key("dd", **LATENT) == first_16_bytes(
        '{"background":[255,255,255],"bucket":[64,48],"compute_dtype":"float32","crop":[3,0],'
        '"decode_rules":1,"flipped":false,"image_sha256":"dd","kind":"prebake.latent",'
        '"posterior":"sample","resized":[70,48],"scaling_factor":0.18215,"shift_factor":0.0,'
        '"stored_dtype":"float16","vae":"cc","version":1}'
    )


def test_canonical_json_sorts_and_keeps_non_ascii():
    assert canonical_json({"b": [1, 2.5, None, True], "a": "é"}) == (
        b'{"a":"\xc3\xa9","b":[1,2.5,null,true]}'
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_canonical_json_has_no_form_for_what_json_lacks(value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("encoders", [("aa", "other")]),
        ("encoders", [("other", "bb")]),
        ("encoders", [("aa", "bb"), ("aa", "bb")]),
        ("max_token_length", 150),
        ("clip_skip", 2),
        ("compute_dtype", "bfloat16"),
        ("stored_dtype", "float32"),
    ],
)
def test_all_that_changes_the_states_changes_the_text_key(name, value):
    assert text_key("a", **TEXT) != text_key("a", **(TEXT | {name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("decode_rules", 2),
        ("bucket", (48, 64)),
        ("resized", (71, 48)),
        ("crop", (0, 3)),
        ("flipped", True),
        ("background", (255, 255, 254)),
        ("vae", "dd"),
        ("scaling_factor", 0.13025),
        ("shift_factor", 0.1),
        ("posterior", "mode"),
        ("compute_dtype", "float16"),
        ("stored_dtype", "bfloat16"),
    ],
)
def test_all_that_changes_the_latents_changes_the_latent_key(name, value):
    assert latent_key("dd", **LATENT) != latent_key("dd", **(LATENT | {name: value}))
    assert latent_key("dd", **LATENT) != latent_key("ee", **LATENT)


PATHS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | PATHS,
    lambda inner: st.lists(inner) | st.dictionaries(PATHS, inner),
    max_leaves=8,
)


@given(PATHS, PATHS, PATHS, PATHS)
def test_two_samples_have_one_id_only_if_source_and_path_are_equal(s1, p1, s2, p2):
    assert (sample_id(s1, p1) == sample_id(s2, p2)) == ((s1, p1) == (s2, p2))


@given(PATHS, PATHS)
def test_no_part_of_a_path_can_pass_for_the_source(source, path):
    ids = {sample_id(source, path), sample_id(source + path, ""), sample_id("", source + path)}
    pairs = {(source, path), (source + path, ""), ("", source + path)}
    assert len(ids) == len(pairs)


@given(VALUES)
def test_canonical_json_is_read_back_as_the_value(value):
    data = canonical_json(value)
    assert json.loads(data) == value
    assert canonical_json(json.loads(data)) == data


@given(VALUES)
def test_a_hash_is_32_lower_case_hex_digits(value):
    digest = hash16(value)
    assert len(digest) == 32
    assert set(digest) <= set("0123456789abcdef")
    assert digest == hashlib.sha256(canonical_json(value)).hexdigest()[:32]


def test_unicode_is_told_apart_by_code_points():
    """A path in composed and in decomposed form names two files on Linux, so two samples."""
    assert sample_id("s", "\u00e9.png") != sample_id("s", "e\u0301.png")
