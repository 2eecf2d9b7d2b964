"""Addresses are told from paths, however pathlib has written them."""

import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.storage.address import Address, as_path, is_address

NAMES = st.lists(st.text("ab.-_ 01", min_size=1, max_size=6).filter(lambda name: name.strip(".")), min_size=1)


@given(st.sampled_from(["s3", "gs", "memory", "hf+x", "abfs"]), NAMES)
def test_an_address_keeps_its_text_through_pathlib(scheme: str, names: list[str]) -> None:
    text = f"{scheme}://{'/'.join(names)}"
    address = as_path(text)
    assert isinstance(address, Address)
    assert str(address) == os.fspath(address) == f"{address}" == text
    assert as_path(Path(text)) == as_path(address) == as_path(Path(text).expanduser()) == address
    assert is_address(text)
    assert is_address(Path(text))
    assert str(address / "at") == f"{text}/at"
    assert isinstance((address / "at").parent, Address)
    assert (address / "at").parent == address
    assert address.name == names[-1]
    assert os.path.join(address, "at") == f"{text}/at"
    assert address.resolve() is address
    assert pickle.loads(pickle.dumps(address)) == address
    assert str(pickle.loads(pickle.dumps(address))) == text


@given(NAMES)
def test_paths_are_absolute(names: list[str]) -> None:
    text = "/".join(names)
    assert as_path(text) == Path(os.path.abspath(text))
    assert not is_address(text)
    assert as_path(f"file:///{text}") == Path("/") / text
    assert not is_address(f"file:///{text}")


def test_what_leads_out_of_an_address_stays_within_its_scheme() -> None:
    assert str(as_path("s3://bucket/a/../../../b")) == "s3://b"
    for text in ("s3://", "s3:///", "s3://a/.."):
        with pytest.raises(ValueError, match="neither a bucket nor a path"):
            as_path(text)
    assert not is_address("C:/runs/at")
    assert str(as_path("S3://bucket/run")) == str(as_path(Path("S3://bucket/run"))) == "s3://bucket/run"
    for chain in ("simplecache::s3://bucket/run", "zip://a::s3://bucket/run"):
        with pytest.raises(ValueError, match="chain of addresses"):
            as_path(chain)
