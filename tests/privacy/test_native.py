"""The compiled kernels beyond what the engine's tests show: large shapes, signs, noise, and life without a compiler."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from dpbench.errors import ConfigurationError
from dpbench.privacy import native
from dpbench.privacy.gradients import layers
from dpbench.privacy.gradients._convolution import ConvolutionGradients
from dpbench.privacy.gradients.discretization import Discretization, DiscretizedGradients, DiscretizedOuterProduct
from dpbench.privacy.gradients.parameter import InstantiatedGradients, OuterProductGradients, ParameterGradients
from dpbench.privacy.mechanism.clipping import VectorGroup, clip_and_sum
from dpbench.privacy.mechanism.noise import add_gaussian_noise
from dpbench.privacy.native import kernels, loader
from dpbench.privacy.native.known_answers import DIGEST, SPACING, START, digest_of_numbers, wrong_answers
from dpbench.privacy.native.known_answers import KEY as KNOWN
from tests.support import forks
from tests.support.chacha import KEY, chacha20, normal_numbers, pairs_of_blocks
from tests.support.cli import HANGS
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
    double = nn.Conv2d(
        layer.in_channels,
        layer.out_channels,
        layer.kernel_size,
        layer.stride,
        layer.padding,
        layer.dilation,  # type: ignore[arg-type]
    ).double()
    rows = []
    for x, y in zip(a.double(), g.double(), strict=True):
        out = double(x[None])
        rows.append(torch.autograd.grad(out, double.weight, y[None])[0])
    return torch.stack(rows)


@settings(max_examples=60, deadline=None)
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
    want = truth(layer, a, g)
    assert relative_error(got.per_record(), want) < 1e-6
    assert relative_error(got.squared_norms(), want.flatten(1).square().sum(1)) < 1e-6
    weights = torch.tensor([0.5, -1.0, 2.0])
    assert relative_error(got.weighted_sum(weights), torch.einsum("r,roihw->oihw", weights.double(), want)) < 1e-6
    assert isinstance(got, ConvolutionGradients)
    assert relative_error(got.bias(), g.double().sum((2, 3))) < 1e-6
    for a_last, g_last in ((True, False), (False, True), (True, True)):
        pair = (
            x.contiguous(memory_format=torch.channels_last) if last else x for x, last in ((a, a_last), (g, g_last))
        )
        assert torch.equal(ConvolutionGradients(layer, *pair, (padding, padding)).per_record(), got.per_record())


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


def test_microbatches_are_sums_of_rows() -> None:
    layer, a, g = convolution(7, 3, 20)
    gradients = ConvolutionGradients(layer, a, g, (0, 0))
    members = torch.tensor([2, 0, 2, 2, 0, 3, 3])  # microbatch 1 is empty
    merged = gradients.merge(members, 4, 0.25)
    want = ParameterGradients.merge(gradients, members, 4, 0.25)
    assert relative_error(merged.per_record(), want.per_record()) < 1e-6
    assert relative_error(merged.squared_norms(), want.squared_norms()) < 1e-6
    assert merged.squared_norms()[1] == 0
    keep = torch.tensor([3, 0])
    assert torch.equal(merged.select(keep).per_record(), merged.per_record()[keep])
    signs = ConvolutionGradients.discretize(merged, 0.3)  # type: ignore[arg-type]
    assert relative_error(signs.per_record(), torch.sign(want.per_record()) * (want.per_record().abs() > 0.3)) < 1e-6


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_kernels_are_in_float32_whatever_the_default(default: torch.dtype) -> None:
    """Lightning sets another default inside a step with precision=bf16-true; the kernels write float32."""
    layer, a, g = convolution(300, 3, 20)
    x, outer = torch.randn(300, 4, 5, 5), (torch.randn(300, 6), torch.randn(300, 7))

    def everything() -> list[Tensor]:
        gradients = ConvolutionGradients(layer, a, g, (0, 0))
        sums = [gradients.squared_norms(), gradients.weighted_sum(weights), kernels.sum_outer(*outer, weights, 0.5)]
        return [*sums, *kernels.group_norm(nn.GroupNorm(2, 4), x, x), kernels.count_outer(*outer, 0.5)]

    weights, before = torch.rand(300), torch.get_default_dtype()
    want = everything()
    try:
        torch.set_default_dtype(default)
        assert all(torch.equal(one, other) for one, other in zip(everything(), want, strict=True))
    finally:
        torch.set_default_dtype(before)


def test_other_numbers_are_refused_rather_than_read_past_their_end() -> None:
    layer, a, g = convolution(5, 3, 20)
    with pytest.raises(TypeError, match="float32 on the CPU, not torch.bfloat16"):
        ConvolutionGradients(layer, a, g, (0, 0)).weighted_sum(torch.ones(5, dtype=torch.bfloat16))


def test_uses_of_a_layer_add_up_record_by_record() -> None:
    layer, *first = convolution(5, 3, 20)
    _, *second = convolution(5, 3, 20)
    one, two = (ConvolutionGradients(layer, a, g, (0, 0)) for a, g in (first, second))
    both, want = one.plus([two]), truth(layer, *first) + truth(layer, *second)
    assert relative_error(both.per_record(), want) < 1e-6
    assert relative_error(both.squared_norms(), want.flatten(1).square().sum(1)) < 1e-6
    signs = Discretization(0.3)([both], 5, [want[0].numel()])[0]
    assert relative_error(signs.per_record(), torch.sign(want) * (want.abs() > 0.3)) < 1e-6


def test_rows_are_merged_into_records() -> None:
    layer, a, g = convolution(5, 3, 20)
    rows, want = ConvolutionGradients(layer, a, g, (0, 0)), truth(layer, a, g)
    members = torch.tensor([2, 0, 2, 2, 0])
    merged = torch.zeros(3, *want.shape[1:], dtype=want.dtype).index_add_(0, members, want, alpha=0.5)
    assert relative_error(rows.merge(members, 3, 0.5).per_record(), merged) < 1e-6
    twice = rows.merge(members, 3, 0.5).merge(torch.tensor([1, 0, 1]), 2, 3.0)
    assert relative_error(twice.per_record()[1], 3 * (merged[0] + merged[2])) < 1e-6


def pure_signs(gradients: ParameterGradients, threshold: float, records: int) -> DiscretizedGradients:
    rows = gradients.per_record()
    return DiscretizedGradients(InstantiatedGradients(lambda: rows), threshold, records, rows[0].numel())


@pytest.mark.parametrize("outputs", [10, 16, 48])
def test_signs_are_those_of_pure_torch(outputs: int) -> None:
    """Exactly: norms count what the sum holds, or a sum could move by more than its sensitivity."""
    layer, a, g = convolution(6, 4, outputs)
    linear = OuterProductGradients(torch.randn(6, 1, outputs), torch.randn(6, 1, 203))
    for gradients in (ConvolutionGradients(layer, a, g, (0, 0)), linear):
        size = gradients.per_record()[0].numel()
        (ours,) = Discretization(0.4)([gradients], 6, [size])
        assert isinstance(ours, ConvolutionGradients | DiscretizedOuterProduct)
        want = pure_signs(gradients, 0.4, 6)
        weights = torch.linspace(-1, 1, 6)
        assert torch.equal(ours.per_record(), want.per_record())
        assert torch.equal(ours.squared_norms(), want.squared_norms())
        assert relative_error(ours.weighted_sum(weights), want.weighted_sum(weights)) < 1e-6
        for record in range(6):  # the norm is that of what is summed
            one = ours.weighted_sum(torch.eye(6)[record])
            assert float(one.square().sum()) == float(ours.squared_norms()[record])
        keep = torch.tensor([5, 1])
        assert torch.equal(ours.select(keep).per_record(), ours.per_record()[keep])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("where", ["input", "gradient"])
def test_a_record_that_is_not_finite_contributes_nothing(bad: float, where: str) -> None:
    """-ffast-math would let it pass as small; and it must not leak into the record after it."""
    layer, a, g = convolution(6, 3, 10)
    clean = clip_and_sum([ConvolutionGradients(layer, a[1:], g[1:], (0, 0))], [VectorGroup("all", (0,), 1.0)])[0]
    (a if where == "input" else g)[0, 1] = bad
    dirty = clip_and_sum([ConvolutionGradients(layer, a, g, (0, 0))], [VectorGroup("all", (0,), 1.0)])[0]
    assert relative_error(dirty[0], clean[0]) < 1e-6


def test_neighbors_move_the_sum_by_at_most_the_bound() -> None:
    layer, a, g = convolution(9, 5, 33)
    groups = [VectorGroup("all", (0,), 0.7)]
    whole = clip_and_sum([ConvolutionGradients(layer, a, 1e3 * g, (0, 0))], groups)[0][0]
    for left in range(9):
        keep = [r for r in range(9) if r != left]
        without = clip_and_sum([ConvolutionGradients(layer, a[keep], 1e3 * g[keep], (0, 0))], groups)[0][0]
        assert 0.6999 < float((whole - without).norm()) <= 0.7 * (1 + 1e-5)


@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_group_norm_far_from_zero(offset: float) -> None:
    torch.manual_seed(0)
    layer, x = nn.GroupNorm(4, 20), torch.randn(3, 20, 7, 5) + offset
    g = torch.randn_like(x)
    scale, shift = kernels.group_norm(layer, x, g)
    normalized = nn.functional.group_norm(x.double(), 4, eps=layer.eps)
    assert relative_error(scale, (normalized * g).sum((2, 3))) < 1e-5
    assert relative_error(shift, g.double().sum((2, 3))) < 1e-6


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


@pytest.mark.parametrize(
    ("block", "word"),
    [(223_802_713, 5), (469_722_992, 2), (227_722_228, 4), (491_723_419, 1), (538_558_765, 2), (591_728_823, 5)],
)
def test_pairs_where_words_of_24_bits_end(block: int, word: int) -> None:
    """Places of the stream where the word of the radius is 0 to 4 of 2^32: √(48 log 2) is 5.77."""
    radius, angle = (float(x[word, 0]) for x in pairs_of_blocks(np.array([block], np.uint64)))
    assert radius > 6.4
    place = block // 16 * 256 + word * 16 + block % 16
    got = [torch.zeros(1), torch.zeros(1)]
    for number, at in zip(got, (place, place + 128), strict=True):
        kernels.add_noise(number, at, 1.0, FINE, KEY)
    assert float(torch.cat(got).double().norm()) == pytest.approx(radius, abs=2e-6)
    assert float(got[0]) == pytest.approx(radius * np.cos(angle), abs=3e-6)


def test_small_radii_have_all_bits() -> None:
    """Of words that were read as float32 the squares of the smallest radii would be multiples of 2^-23."""
    noise = torch.zeros(20_000_000 // 256 * 256)
    kernels.add_noise(noise, 0, 1.0, FINE, KEY)
    squares = noise.view(-1, 2, 128).double().square().sum(1).flatten()
    small = squares[squares < 1.6e-5].numpy()
    assert len(small) > 50
    assert stats.kstest(small / 1.6e-5, "uniform").pvalue > 1e-4
    assert stats.kstest(small * 2**23 % 1, "uniform").pvalue > 1e-4


@pytest.mark.parametrize(("scale", "accepted"), [(1.0, True), (2 / 3, False), (3 / 2, False)])
def test_noise_has_the_right_scale_and_no_other(scale: float, accepted: bool) -> None:
    total = add_gaussian_noise(torch.zeros(200_000), [(100_000, 3.0), (100_000, 0.5)], (7,))
    for part, std in ((total[:100_000], 3.0), (total[100_000:], 0.5)):
        assert (stats.kstest(part.numpy(), "norm", args=(0, scale * std)).pvalue > 1e-4) == accepted


def test_keys_and_segments_share_no_noise() -> None:
    def draw(key: int) -> Tensor:
        return add_gaussian_noise(torch.zeros(20_000), [(10_000, 1.0), (10_000, 1.0)], (key,))

    one, two = draw(1), draw(2)
    assert torch.equal(one, draw(1))
    assert abs(float(torch.corrcoef(torch.stack([one, two]))[0, 1])) < 0.04
    assert abs(float(torch.corrcoef(torch.stack([one[:10_000], one[10_000:]]))[0, 1])) < 0.05


# ------------------------------------------------------------------------------------------------- choices


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    process = forks.start(Path(), "-c", [code], {**os.environ, **environment})
    out, err = process.communicate(HANGS)
    return subprocess.CompletedProcess(code, process.wait(HANGS), out, err)


@pytest.mark.slow
def test_without_a_compiler_pure_torch_computes(tmp_path: Path) -> None:
    code = "from dpbench.privacy import native; print(native.library(), repr(native.signature()))"
    missing = {"XDG_CACHE_HOME": str(tmp_path), "CXX": "no-such-compiler"}
    done = run(code, DPBENCH_NATIVE="auto", **missing)
    assert (done.returncode, done.stdout, done.stderr) == (0, "None ''\n", "")
    done = run("from dpbench.privacy import native; native.select('on')", **missing)
    assert "ConfigurationError: engine.native=on, but" in done.stderr.splitlines()[-1]
    assert "no-such-compiler" in done.stderr.splitlines()[-1]


LOADED = """
import numpy as np, torch
from dpbench.privacy.native import kernels
total = torch.zeros(1000)
kernels.add_noise(total, 0, 1.0, 2.0**-8, bytes(32))
print(round(float(total.std())))
"""


@pytest.fixture(scope="module")
def noiseless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels that add no noise."""
    folder = tmp_path_factory.mktemp("noiseless")
    source = folder / "noiseless.cpp"
    noise = "* inverse + numbers[j]"
    text = loader._SOURCE.read_text()
    assert text.count(noise) == 1
    source.write_text(text.replace(noise, "* inverse"))
    file = folder / "noiseless.so"
    command = ["g++", *loader._FLAGS, "-shared", "-fPIC", "-o", str(file), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return file


def planted(kernels: Path, cache: Path) -> Path:
    """Kernels at the place from which the right ones are loaded."""
    file = cache / "dpbench" / loader._name() / "kernels.so"
    file.parent.mkdir(parents=True, mode=0o700)
    cache.chmod(0o700)
    file.parent.parent.chmod(0o700)
    shutil.copyfile(kernels, file)
    file.chmod(0o700)
    return file


def writable_file(file: Path) -> None:
    file.chmod(0o777)


def writable_folder(file: Path) -> None:
    file.parent.chmod(0o777)


def writable_folder_above(file: Path) -> None:
    file.parent.parent.chmod(0o777)


def writable_cache(file: Path) -> None:
    file.parents[2].chmod(0o777)


def link(file: Path) -> None:
    other = file.with_name("other.so")
    file.rename(other)
    file.symlink_to(other)


def another_user(file: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(file, 65534, 65534)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A command that copies the kernels of this process, which takes no seconds."""
    assert native.library() is not None
    script = tmp_path_factory.mktemp("compiler") / "c++"
    built = loader.cache_folder() / "kernels.so"
    script.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp {built} "$2"\n')
    script.chmod(0o700)
    return str(script)


@pytest.mark.parametrize(
    "open_to_others",
    [writable_file, writable_folder, writable_folder_above, writable_cache, link, another_user],
)
def test_kernels_that_others_may_have_written_are_not_loaded(
    open_to_others: Callable[[Path], None], noiseless: Path, compiler: str, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    file = planted(noiseless, cache)
    open_to_others(file)
    before = sorted(os.listdir(file.parent))
    done = run(LOADED, DPBENCH_NATIVE="on", XDG_CACHE_HOME=str(cache), CXX=compiler)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "UserWarning" in line]
    assert "compiled for this process alone, because" in line and "XDG_CACHE_HOME" in line
    assert sorted(os.listdir(file.parent)) == before


def test_kernels_that_compute_wrongly_are_not_used(noiseless: Path, tmp_path: Path) -> None:
    """One's own, so nobody planted them: a compiler can be wrong."""
    planted(noiseless, tmp_path / "cache")
    code = "from dpbench.privacy import native; print(native.library()); native.warn_if_missing()"
    done = run(code, DPBENCH_NATIVE="auto", XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert (done.returncode, done.stdout) == (0, "None\n")
    assert "compute wrongly (noise): delete this folder" in done.stderr
    done = run(LOADED, DPBENCH_NATIVE="on", XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert "ConfigurationError: engine.native=on, but" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("float scale, float& one, float& two) {", "float scale, float& one, float& two) { return;", "noise"),
        ("round < 10", "round < 9", "noise"),
        ("sums[j] += factors[r] * (float)rows[r * size + start + j]", "sums[j] += factors[0] * rows[j]", "sums"),
        ("memset(sum, 0, taps * wide * 4);", "memset(sum, 0, 4);", "gradients of a convolution"),
    ],
)
def test_known_answers_find_what_is_wrong(old: str, new: str, what: str, tmp_path: Path) -> None:
    text = loader._SOURCE.read_text()
    assert old in text
    source, file = tmp_path / "wrong.cpp", tmp_path / "wrong.so"
    source.write_text(text.replace(old, new))
    subprocess.run(
        ["g++", *loader._FLAGS, "-shared", "-fPIC", "-o", str(file), str(source)], check=True, capture_output=True
    )
    library = ctypes.CDLL(str(file))
    loader.declare(library)
    assert wrong_answers(library) == what


def test_the_known_numbers_are_those_of_the_reference() -> None:
    """With a pair of the tail among them, and none so close to an edge that rounding decides."""
    group = START // 256
    blocks = np.arange(16 * group, 16 * group + 16, dtype=np.uint64)
    radius, angle = pairs_of_blocks(blocks)
    numbers = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)]).reshape(-1)
    assert KNOWN == KEY and radius.max() > 6.6
    assert np.abs(numbers / SPACING - np.floor(numbers / SPACING) - 0.5).min() > 1e-3
    assert digest_of_numbers(np.rint(numbers / SPACING) * SPACING) == DIGEST


def test_arguments_of_kernels_are_declared_as_in_the_source() -> None:
    library = native.library()
    pointer, whole = ctypes.c_void_p, ctypes.c_int64
    declared = {
        "dpbench_add_noise": [pointer, whole, whole, ctypes.c_float, ctypes.c_double, pointer, whole],
        "dpbench_convolution": [*[pointer] * 5, ctypes.c_float, ctypes.c_float, *[pointer] * 3],
    }
    for name, types in declared.items():
        function = getattr(library, name)
        assert list(function.argtypes) == types and function.restype is None


def test_that_there_are_no_kernels_is_said_once(tmp_path: Path) -> None:
    code = "from dpbench.privacy import native; native.warn_if_missing(); native.warn_if_missing()"
    missing = {"XDG_CACHE_HOME": str(tmp_path), "CXX": "no-such-compiler"}
    done = run(code, DPBENCH_NATIVE="auto", **missing)
    assert done.stderr.count("there are no compiled kernels") == 1 and "no-such-compiler" in done.stderr
    assert run(code, DPBENCH_NATIVE="off", **missing).stderr == ""
    assert run(code, DPBENCH_NATIVE="auto", LOCAL_RANK="1", **missing).stderr == ""


def test_a_broken_compiler_and_a_full_cache_are_no_obstacle(tmp_path: Path) -> None:
    code = "from dpbench.privacy import native; print(native.library())"
    assert run(code, DPBENCH_NATIVE="auto", XDG_CACHE_HOME=str(tmp_path), CXX="false").stdout == "None\n"
    (tmp_path / "file").touch()
    assert run(code, DPBENCH_NATIVE="auto", XDG_CACHE_HOME=str(tmp_path / "file")).stdout == "None\n"
    (tmp_path / "dpbench" / loader._name() / "kernels.so").write_text("damaged")
    assert run(code, DPBENCH_NATIVE="auto", XDG_CACHE_HOME=str(tmp_path)).stdout.startswith("<CDLL")


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="must be auto, on or off, not 'yes'"):
        native.select("yes")  # type: ignore[arg-type]


@pytest.mark.parametrize(("kernel", "is_native"), [(3, True), (1, False)])
def test_matrix_products_are_left_to_pytorch(kernel: int, is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPBENCH_NATIVE", "auto")
    layer = nn.Conv2d(3, 4, kernel)
    a = torch.randn(2, 3, 5, 5)
    weight = layers.convolution(layer, (a,), torch.ones_like(layer(a)))["weight"]
    assert isinstance(weight, ConvolutionGradients) == is_native
