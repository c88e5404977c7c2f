"""Hostile release checkpoints: nothing in them runs, all is refused in one line, and data is read as data."""

import io
import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from adlm.compat.checkpoints import read_release
from adlm.compat.pickles import Checkpoint, Inert, plain


def with_pickle(good: Path, path: Path, data: bytes) -> Path:
    """The same archive with another data.pkl."""
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for member in old.infolist():
            new.writestr(member.filename, data if member.filename.endswith("data.pkl") else old.read(member))
    return path


class Call:
    """Pickles to a call of any function with any arguments."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def hostile(function, *args) -> bytes:
    return pickle.dumps({"state_dict": {}, "hyper_parameters": {"config": Call(function, *args)}}, protocol=2)


@pytest.mark.parametrize("where", ["os.system", "eval", "exec", "getattr", "__import__", "subprocess", "open"])
def test_code_in_a_pickle_is_refused_and_not_run(good, tmp_path, where):
    import subprocess

    mark = tmp_path / "it-ran"
    data = {
        "os.system": hostile(os.system, f"touch {mark}"),
        "eval": hostile(eval, f"open({str(mark)!r}, 'w')"),
        "exec": hostile(exec, f"open({str(mark)!r}, 'w')"),
        "getattr": hostile(getattr, "x", "upper"),
        "__import__": hostile(__import__, "antigravity"),
        "subprocess": hostile(subprocess.Popen, ["touch", str(mark)]),
        "open": hostile(open, str(mark), "w"),
    }[where]
    path = with_pickle(good, tmp_path / "bad.ckpt", data)
    with pytest.raises(ValueError, match="refused, nothing of it was run"):
        read_release(path)
    assert not mark.exists()
    pickle.loads(hostile(os.system, f"touch {mark}"))  # the trap is real: an ordinary reader springs it
    assert mark.exists()


def test_calls_into_known_packages_are_remembered_and_not_made(good, tmp_path):
    import torch.hub

    calls = {"config": {}, "tokenizer": Call(torch.hub.load, "nobody/nothing", "model")}
    data = pickle.dumps({"state_dict": {}, "hyper_parameters": calls}, protocol=4)
    with Checkpoint(with_pickle(good, tmp_path / "x.ckpt", data)) as file:
        found = file.tree["hyper_parameters"]["tokenizer"]
    assert isinstance(found, Inert)
    assert (found.origin, found.args) == ("torch.hub.load", ("nobody/nothing", "model"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a pickle",
        b"\x80\x02}",  # no end
        b"\x80\x02]q\x00.",  # a list
        b"\x80\x02}r\xff\xff\xff\x7f.",  # a memo index that would ask the C machine for 32 GB
        b"\x80\x02(X\xff\xff\xff\x7fab.",  # a string of 2 GB that is not there
        b"\x80\x02c__builtin__\ndict\n}b.",  # state set on a class
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
        b"\x80\x02U\x03abcQ.",  # a persistent id of another kind
        b"\x80\x02\x82\x01.",  # the extension registry
    ],
)
def test_malformed_pickles_are_refused(good, tmp_path, data):
    with pytest.raises(ValueError, match=r"is damaged|not a checkpoint|no state_dict"):
        read_release(with_pickle(good, tmp_path / "bad.ckpt", data))


def test_settings_that_explode_are_refused(good, tmp_path):
    laughs = ["ha"]
    for _ in range(60):
        laughs = [laughs, laughs]
    data = pickle.dumps({"state_dict": {}, "hyper_parameters": {"config": laughs}}, protocol=2)
    with pytest.raises(ValueError, match="too large to be settings"):
        read_release(with_pickle(good, tmp_path / "bad.ckpt", data))


def test_a_packed_member_is_refused(good, tmp_path):
    path = tmp_path / "bomb.ckpt"
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
        new.writestr("good/data/999", bytes(50_000_000), compress_type=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < good.stat().st_size + 100_000
    with pytest.raises(ValueError, match="is compressed, which torch never does: refused"):
        read_release(path)


def test_members_that_claim_more_than_the_file_are_refused(good, tmp_path):
    data = bytearray(good.read_bytes())
    entry = data.index(b"PK\x01\x02", data.rindex(b"PK\x01\x02") - 4000)
    data[entry + 20 : entry + 28] = struct.pack("<II", 2**31, 2**31)  # stored and original size
    (tmp_path / "forged.ckpt").write_bytes(data)
    with pytest.raises(ValueError, match="more than the file has: refused"):
        read_release(tmp_path / "forged.ckpt")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused(good, tmp_path, share):
    data = good.read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ValueError, match="not a complete torch checkpoint"):
        read_release(tmp_path / "cut.ckpt")


def test_a_flipped_bit_is_noticed(good, tmp_path):
    with zipfile.ZipFile(good) as archive:
        member = max(archive.infolist(), key=lambda m: m.file_size)
    data = bytearray(good.read_bytes())
    data[member.header_offset + member.file_size // 2 + 100] ^= 1
    (tmp_path / "flipped.ckpt").write_bytes(data)
    with pytest.raises(ValueError, match="is damaged"):
        read_release(tmp_path / "flipped.ckpt", ema=False)


def test_old_pickles_and_other_files_are_not_read(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="a pickle of the old kind, which is not read"):
        read_release(tmp_path / "old.ckpt")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(ValueError, match=r"has no data\.pkl"):
        read_release(tmp_path / "other.zip")
    with pytest.raises(ValueError, match="is not a file"):
        read_release(tmp_path / "missing.ckpt")


def test_every_kind_of_tensor_is_read_as_torch_reads_it(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "view": base[1:3, ::2], "transposed": base.t(), "scalar": torch.tensor(3.5), "empty": torch.zeros(0, 3),
        "half": base.half(), "bfloat16": base.bfloat16(), "long": base.long(), "bool": base > 3,
        "double": base.double(), "parameter": torch.nn.Parameter(base),
    }  # fmt: skip
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    (tmp_path / "x.ckpt").write_bytes(buffer.getvalue())
    with Checkpoint(tmp_path / "x.ckpt") as file:
        for name, value in tensors.items():
            read = file.tensor(file.tree[name], name)
            assert read.dtype == value.dtype and torch.equal(read, value.detach()), name


def test_plain_reads_omegaconf_as_data(tmp_path):
    from omegaconf import OmegaConf

    tree = {"a": {"b": 1, "c": [1.5, None, "x"]}, "d": "${a.b}", "e": True}
    torch.save({"config": OmegaConf.create(tree)}, tmp_path / "x.ckpt")
    with Checkpoint(tmp_path / "x.ckpt") as file:
        assert plain(file.tree["config"]) == tree
