"""The compiled kernels beyond what the engine's tests show: large shapes, signs, noise, and life without a compiler."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpbench.errors import ConfigurationError
from dpbench.privacy import native
from dpbench.privacy.gradients._convolution import ConvolutionGradients
from dpbench.privacy.gradients.discretization import Discretization, DiscretizedGradients, DiscretizedOuterProduct
from dpbench.privacy.gradients.parameter import InstantiatedGradients, OuterProductGradients, ParameterGradients
from dpbench.privacy.mechanism.clipping import VectorGroup, clip_and_sum
from dpbench.privacy.native import kernels, loader
from dpbench.privacy.native.known_answers import wrong_answers
from tests.support.chacha import KEY, chacha20, normal_numbers, pairs_of_blocks
from tests.support.reference import relative_error

FINE = 2.0**-30
"""Spacing of a grid that hides nothing of a number."""


@pytest.fixture(scope="module", autouse=True)
def kernels_on() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPBENCH_NATIVE", "auto")
        if native.library() is None:
            pytest.skip("no C++ compiler")
        patch.setenv("DPBENCH_NATIVE", "on")
        yield


def convolution(
    records: int = 5, inputs: int = 3, outputs: int = 20, **options: int
) -> tuple[nn.Conv2d, Tensor, Tensor]:
    torch.manual_seed(0)
    layer = nn.Conv2d(inputs, outputs, options.pop("kernel_size", 3), **options)
    a = torch.randn(records, inputs, 9, 11)
    g = torch.randn_like(layer(a))
    return layer, a, g


def truth(layer: nn.Conv2d, a: Tensor, g: Tensor) -> Tensor:
    """Record by record, in float64, by torch."""
    double = copy.deepcopy(layer).double()
    outputs = [double(x[None]) for x in a.double()]
    rows = [torch.autograd.grad(out, double.weight, y[None])[0] for out, y in zip(outputs, g.double(), strict=True)]
    return torch.stack(rows)


def assert_rows(got: ParameterGradients, want: Tensor) -> None:
    weights = torch.tensor([0.5, -1.0, 2.0]).repeat(3)[: len(want)]
    assert relative_error(got.per_record(), want) < 1e-6
    assert relative_error(got.squared_norms(), want.flatten(1).square().sum(1)) < 1e-6
    assert relative_error(got.weighted_sum(weights), torch.einsum("r,r...->...", weights.double(), want)) < 1e-6


@settings(max_examples=25, deadline=None)
@given(
    inputs=st.sampled_from([1, 2, 3, 7, 16, 40]),
    outputs=st.sampled_from([1, 10, 16, 31, 32, 48, 64, 70, 130]),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
)
def test_convolution_of_every_width(
    inputs: int, outputs: int, kernel: int, stride: int, padding: int, dilation: int
) -> None:
    """Every number of lanes, vectors and taps, against float64."""
    layer, a, g = convolution(3, inputs, outputs, kernel_size=kernel, stride=stride, padding=padding, dilation=dilation)
    got = ConvolutionGradients(layer, a, g, (padding, padding))
    assert_rows(got, truth(layer, a, g))
    assert relative_error(got.bias(), g.double().sum((2, 3))) < 1e-6
    last = [x.contiguous(memory_format=torch.channels_last) for x in (a, g)]
    assert torch.equal(ConvolutionGradients(layer, *last, (padding, padding)).per_record(), got.per_record())


def test_uses_and_microbatches_add_up() -> None:
    layer, *first = convolution(7, 3, 20)
    second = [torch.randn_like(x) for x in first]
    one, two = (ConvolutionGradients(layer, a, g, (0, 0)) for a, g in (first, second))
    both, want = one.plus([two]), truth(layer, *first) + truth(layer, *second)
    assert_rows(both, want)
    members = torch.tensor([2, 0, 2, 2, 0, 3, 3])  # microbatch 1 is empty
    wanted = torch.zeros(4, *want.shape[1:], dtype=want.dtype).index_add_(0, members, want, alpha=0.25)
    assert_rows(both.merge(members, 4, 0.25), wanted)


def test_the_number_of_threads_changes_nothing() -> None:
    layer, a, g = convolution(16, 8, 40)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            gradients = ConvolutionGradients(layer, a, g, (0, 0))
            noise = torch.zeros(3000)
            kernels.add_noise(noise, 0, 1.0, FINE, KEY)
            results.append((gradients.squared_norms(), gradients.weighted_sum(torch.ones(16)), noise))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


def test_kernels_are_in_float32_whatever_the_default() -> None:
    """Lightning sets another default inside a step with precision=bf16-true; the kernels write float32."""
    layer, a, g = convolution(300, 3, 20)
    outer = torch.randn(300, 6), torch.randn(300, 7)

    def everything() -> list[Tensor]:
        gradients = ConvolutionGradients(layer, a, g, (0, 0))
        return [gradients.squared_norms(), gradients.weighted_sum(weights), kernels.sum_outer(*outer, weights, 0.5)]

    weights, before = torch.rand(300), torch.get_default_dtype()
    want = everything()
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert all(torch.equal(one, other) for one, other in zip(everything(), want, strict=True))
    finally:
        torch.set_default_dtype(before)


def test_other_numbers_are_refused_rather_than_read_past_their_end() -> None:
    layer, a, g = convolution(5, 3, 20)
    with pytest.raises(TypeError, match="float32 on the CPU, not torch.bfloat16"):
        ConvolutionGradients(layer, a, g, (0, 0)).weighted_sum(torch.ones(5, dtype=torch.bfloat16))


def test_signs_are_those_of_pure_torch() -> None:
    """Exactly: norms count what the sum holds, or a sum could move by more than its sensitivity."""
    layer, a, g = convolution(6, 4, 10)
    linear = OuterProductGradients(torch.randn(6, 1, 10), torch.randn(6, 1, 203))
    for gradients in (ConvolutionGradients(layer, a, g, (0, 0)), linear):
        rows = gradients.per_record()
        size = rows[0].numel()
        (ours,) = Discretization(0.4)([gradients], 6, [size])
        assert isinstance(ours, ConvolutionGradients | DiscretizedOuterProduct)
        want = DiscretizedGradients(InstantiatedGradients(lambda rows=rows: rows), 0.4, 6, size)
        assert torch.equal(ours.per_record(), want.per_record())
        assert torch.equal(ours.squared_norms(), want.squared_norms())
        for weights in torch.eye(6):  # the norm is that of what is summed
            assert float(ours.weighted_sum(weights).square().sum()) == float(ours.squared_norms() @ weights)


@pytest.mark.parametrize(
    ("bad", "is_input"),
    [(float("nan"), True), (float("inf"), False), (3e38, True)],
)
def test_a_record_that_is_not_finite_contributes_nothing(bad: float, is_input: bool) -> None:
    """-ffast-math would let it pass as small; and it must not leak into the record after it."""
    layer, a, g = convolution(6, 3, 10)
    clean = clip_and_sum([ConvolutionGradients(layer, a[1:], g[1:], (0, 0))], [VectorGroup("all", (0,), 1.0)])[0]
    (a if is_input else g)[0, 1] = bad
    dirty = clip_and_sum([ConvolutionGradients(layer, a, g, (0, 0))], [VectorGroup("all", (0,), 1.0)])[0]
    assert relative_error(dirty[0], clean[0]) < 1e-6


# ------------------------------------------------------------------------------------------------- noise


def test_the_oracle_is_chacha20() -> None:
    """Section 2.3.2 of RFC 8439: block 1 with the nonce 00:00:00:09:00:00:00:4a:00:00:00:00."""
    counter = np.array([1 + (0x09000000 << 32)], np.uint64)
    words = chacha20(KEY, counter, (0x4A000000, 0))[:, 0].tolist()
    assert words[:4] == [0xE4E7F110, 0x15593BD1, 0x1FDD0F50, 0xC47120A3]
    assert words[12:] == [0xD19C12B5, 0xB94E16DE, 0xE883D0CB, 0x4E3C50A2]


def test_noise_is_box_muller_of_chacha20() -> None:
    size = 1_000_000
    want = normal_numbers((size + 255) // 256)[:size]
    pairs = want[: size // 256 * 256].reshape(-1, 2, 128)
    assert (np.hypot(*pairs.transpose(1, 0, 2)) > 4.08).sum() > 100
    got = torch.zeros(size)
    kernels.add_noise(got, 0, 1.0, FINE, KEY)
    assert np.abs(got.numpy() - want).max() < 3e-6
    later = torch.ones(size - 777)
    kernels.add_noise(later, 777, 2.0, FINE, KEY)
    assert torch.allclose(later, 1 + 2 * got[777:], atol=2e-6)


def test_a_pair_where_words_of_24_bits_end() -> None:
    """A place of the stream where the word of the radius is 0 to 4 of 2^32: √(48 log 2) is 5.77."""
    block, word = 223_802_713, 5
    radius, angle = (float(x[word, 0]) for x in pairs_of_blocks(np.array([block], np.uint64)))
    assert radius > 6.4
    place = block // 16 * 256 + word * 16 + block % 16
    got = [torch.zeros(1), torch.zeros(1)]
    for number, at in zip(got, (place, place + 128), strict=True):
        kernels.add_noise(number, at, 1.0, FINE, KEY)
    assert float(torch.cat(got).double().norm()) == pytest.approx(radius, abs=2e-6)
    assert float(got[0]) == pytest.approx(radius * np.cos(angle), abs=3e-6)


# ------------------------------------------------------------------------------------------------- choices


def compiled(folder: Path, old: str, new: str) -> Path:
    """Kernels that are wrong in one place."""
    text = loader._SOURCE.read_text()
    assert old in text
    source, file = folder / "wrong.cpp", folder / "wrong.so"
    source.write_text(text.replace(old, new))
    command = ["g++", *loader._FLAGS, "-shared", "-fPIC", "-o", str(file), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return file


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("sums[j] += factors[r] * (float)rows[r * size + start + j]", "sums[j] += factors[0] * rows[j]", "sums"),
        ("memset(sum, 0, taps * wide * 4);", "memset(sum, 0, 4);", "gradients of a convolution"),
    ],
)
def test_known_answers_find_what_is_wrong(old: str, new: str, what: str, tmp_path: Path) -> None:
    assert wrong_answers(loader._load(compiled(tmp_path, old, new))) == what


@pytest.fixture(scope="module")
def noiseless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels that add no noise."""
    return compiled(tmp_path_factory.mktemp("noiseless"), "* inverse + numbers[j]", "* inverse")


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A command that copies the kernels of this process, which takes no seconds."""
    script = tmp_path_factory.mktemp("compiler") / "c++"
    built = loader.cache_folder() / "kernels.so"
    script.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp {built} "$2"\n')
    script.chmod(0o700)
    return str(script)


@pytest.fixture
def planted(noiseless: Path, compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Wrong kernels at the place from which the right ones are loaded, where nobody else may write."""
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = loader.cache_folder() / "kernels.so"
    tmp_path.chmod(0o700)
    file.parent.mkdir(parents=True)
    file.parent.chmod(0o700)
    file.parent.parent.chmod(0o700)
    shutil.copyfile(noiseless, file)
    file.chmod(0o700)
    return file


def link(file: Path) -> None:
    other = file.with_name("other.so")
    file.rename(other)
    file.symlink_to(other)


def another_user(file: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(file, 65534, 65534)


@pytest.mark.parametrize(
    "open_to_others",
    [
        lambda file: file.chmod(0o777),
        lambda file: file.parent.parent.chmod(0o777),
        link,
        another_user,
    ],
    ids=["file", "folder above", "link", "another user"],
)
def test_kernels_that_others_may_have_written_are_not_loaded(
    open_to_others: Callable[[Path], None], planted: Path
) -> None:
    open_to_others(planted)
    before = sorted(os.listdir(planted.parent))
    with pytest.warns(UserWarning, match="compiled for this process only, because .*XDG_CACHE_HOME"):
        library = loader._from_cache()
    assert wrong_answers(library) is None
    assert sorted(os.listdir(planted.parent)) == before


def test_kernels_that_compute_wrongly_are_not_used(planted: Path) -> None:
    """One's own, so nobody planted them: a compiler can be wrong."""
    assert str(loader._build.__wrapped__()).endswith("give wrong results (noise): delete this folder")


def test_a_new_cache_is_for_this_user_alone(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    assert wrong_answers(loader._from_cache()) is None
    assert loader.cache_folder().stat().st_mode & 0o777 == 0o700


def test_damaged_kernels_are_compiled_again(planted: Path) -> None:
    planted.write_text("damaged")
    assert wrong_answers(loader._from_cache()) is None


def test_without_kernels_pure_torch_computes_and_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for variable, value, why in (
        ("XDG_CACHE_HOME", str(tmp_path / "file"), "Not a directory"),
        ("CXX", "no-such-compiler", "no-such-compiler"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setenv(variable, value)
        assert why in str(loader._build.__wrapped__())
    monkeypatch.setattr(loader, "_build", loader._build.__wrapped__)
    monkeypatch.setenv("DPBENCH_NATIVE", "auto")
    assert native.library() is None and native.signature() == ""
    native.warn_if_missing.cache_clear()
    with pytest.warns(UserWarning, match="no compiled kernels .*no-such-compiler"):
        native.warn_if_missing()
    with warnings.catch_warnings(action="error"):
        native.warn_if_missing()
    with pytest.raises(ConfigurationError, match="engine.native=on, but .*no-such-compiler"):
        native.select("on")
    with pytest.raises(ConfigurationError, match="must be auto, on or off, not 'yes'"):
        native.select("yes")  # type: ignore[arg-type]
