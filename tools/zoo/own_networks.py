"""Networks in plain torch, as papers and tutorials have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tools.zoo.network import CLASSES, RECORDS, Network, cross_entropy, label, tokens

_LENGTH = 9
_SIDE = 8


def build(name: str) -> Network:
    """A network of that name."""
    return _BUILDERS[name]()


# ------------------------------------------------------------------------------------------- series


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(60, 8)
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(16, CLASSES)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(words), lengths.cpu(), batch_first=True, enforce_sorted=False)
        output, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=words.shape[1])
        return self.tags(output)


def _bidirectional_lstm() -> Network:
    records = [
        (tokens(_LENGTH), torch.tensor(3 + number), torch.randint(0, CLASSES, (_LENGTH,))) for number in range(RECORDS)
    ]

    def step(net: nn.Module, batch: Any) -> Tensor:
        words, lengths, tags = batch
        loss = F.cross_entropy(net(words, lengths).transpose(1, 2), tags, reduction="none")
        is_word = torch.arange(words.shape[1]) < lengths[:, None]
        return ((loss * is_word).sum(1) / lengths).mean()

    return Network(_Tagger(), records, step)


class _Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(60, 8)
        self.encoder = nn.GRU(8, 8, batch_first=True)
        self.decoder = nn.GRUCell(16, 8)
        self.out = nn.Linear(8, 60)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, last = self.encoder(self.words(source))
        state = last[0]
        scores = []
        for word in self.words(target).unbind(1):
            weights = torch.einsum("bth,bh->bt", memory, state).softmax(1)
            context = torch.einsum("bt,bth->bh", weights, memory)
            state = self.decoder(torch.cat([word, context], 1), state)
            scores.append(self.out(state))
        return torch.stack(scores, 1)


def _gru_with_attention() -> Network:
    records = [(tokens(_LENGTH), tokens(5)) for _ in range(RECORDS)]

    def step(net: nn.Module, batch: Any) -> Tensor:
        source, target = batch
        return F.cross_entropy(net(source, target[:, :-1]).transpose(1, 2), target[:, 1:])

    return Network(_Translator(), records, step)


class _Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [(1, 8, 1), (8, 8, 2), (8, 8, 4)]
        self.layers = nn.ModuleList(
            parametrizations.weight_norm(nn.Conv1d(before, after, 3, dilation=dilation))
            for before, after, dilation in widths
        )
        self.out = nn.Conv1d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(F.pad(x, (2 * 2**number, 0))).relu()
        return self.out(x)


def _temporal_convolutions() -> Network:
    records = [(torch.randn(1, 20),) for _ in range(RECORDS)]

    def step(net: nn.Module, batch: Any) -> Tensor:
        (x,) = batch
        return F.mse_loss(net(x[..., :-1]), x[..., 1:])

    return Network(_Causal(), records, step)


class _Acoustic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, bidirectional=True)
        self.out = nn.Linear(16, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x.transpose(0, 1))[0]).log_softmax(-1)


def _lstm_for_ctc() -> Network:
    records = [(torch.randn(15, 6), torch.randint(1, 20, (4,))) for _ in range(RECORDS)]

    def step(net: nn.Module, batch: Any) -> Tensor:
        x, labels = batch
        of_frames = torch.full((len(x),), x.shape[1])
        of_labels = torch.full((len(x),), labels.shape[1])
        return F.ctc_loss(net(x), labels, of_frames, of_labels)

    return Network(_Acoustic(), records, step)


# --------------------------------------------------------------------------------------- generation


class _UNet(nn.Module):
    """Of two resolutions, with the time of a diffusion where one is given."""

    def __init__(self, norm: Callable[[int], nn.Module], outputs: int, takes_time: bool = False) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), norm(8), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), norm(16), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Sequential(nn.Conv2d(16, 8, 3, padding=1), norm(8), nn.ReLU(), nn.Conv2d(8, outputs, 1))
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16)) if takes_time else None

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        high = self.down(x)
        low = self.middle(high)
        if self.time is not None and time is not None:
            angles = time[:, None] * 2.0 ** torch.arange(4)
            low = low + self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
        return self.out(torch.cat([high, self.up(low)], 1))


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


def _unet(norm: Callable[[int], nn.Module] = _group_norm) -> Network:
    records = [(torch.randn(1, _SIDE, _SIDE), torch.randint(0, CLASSES, (_SIDE, _SIDE))) for _ in range(RECORDS)]
    return Network(_UNet(norm, CLASSES), records, cross_entropy)


def _diffusion(draws: bool) -> Network:
    pictures = [torch.randn(1, _SIDE, _SIDE) for _ in range(RECORDS)]
    records = [(x,) if draws else (x, torch.rand(()), torch.randn_like(x)) for x in pictures]

    def step(net: nn.Module, batch: Any) -> Tensor:
        x = batch[0]
        time, noise = (torch.rand(len(x)), torch.randn_like(x)) if draws else batch[1:]
        share = time.view(-1, 1, 1, 1)
        return F.mse_loss(net((1 - share).sqrt() * x + share.sqrt() * noise, time), noise)

    return Network(_UNet(_group_norm, 1, takes_time=True), records, step, is_random=draws)


class _Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(_SIDE**2, 16), nn.ReLU(), nn.Linear(16, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, _SIDE**2))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance


def _vae(draws: bool) -> Network:
    pictures = [torch.rand(1, _SIDE, _SIDE) for _ in range(RECORDS)]
    records = [(x,) if draws else (x, torch.randn(4)) for x in pictures]

    def step(net: nn.Module, batch: Any) -> Tensor:
        x = batch[0]
        noise = torch.randn(len(x), 4) if draws else batch[1]
        guess, mean, log_variance = net(x, noise)
        likelihood = F.binary_cross_entropy_with_logits(guess, x.flatten(1), reduction="none").sum(1)
        divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum(1) / 2
        return (likelihood + divergence).mean()

    return Network(_Autoencoder(), records, step, is_random=draws)


class _Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(1, 4, 4, stride=4)
        self.codes = nn.Embedding(8, 4)
        self.decoder = nn.ConvTranspose2d(4, 1, 4, stride=4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x).permute(0, 2, 3, 1)
        distances = (z[..., None, :] - self.codes.weight).square().sum(-1)
        code = self.codes(distances.argmin(-1))
        pull = (code - z.detach()).square() + 0.25 * (z - code.detach()).square()
        straight = z + (code - z).detach()
        return self.decoder(straight.permute(0, 3, 1, 2)), pull.mean()


def _vq_vae() -> Network:
    records = [(torch.randn(1, _SIDE, _SIDE),) for _ in range(RECORDS)]

    def step(net: nn.Module, batch: Any) -> Tensor:
        guess, pull = net(batch[0])
        return F.mse_loss(guess, batch[0]) + pull

    return Network(_Quantized(), records, step)


def _critic(penalty: bool) -> Network:
    """The critic's step, with what a generator has made in the records."""
    first: nn.Module = nn.Conv2d(1, 4, 3, stride=2)
    last: nn.Module = nn.Linear(36, 1)
    if not penalty:
        first = parametrizations.spectral_norm(first)
        last = parametrizations.spectral_norm(last)
    model = nn.Sequential(first, nn.LeakyReLU(0.2), nn.Flatten(), last)
    records = [
        (torch.randn(1, _SIDE, _SIDE), torch.randn(1, _SIDE, _SIDE), torch.rand(1, 1, 1)) for _ in range(RECORDS)
    ]

    def step(net: nn.Module, batch: Any) -> Tensor:
        true, made, share = batch
        if not penalty:
            return F.relu(1 - net(true)).mean() + F.relu(1 + net(made)).mean()
        between = (share * true + (1 - share) * made).requires_grad_(True)
        (gradient,) = torch.autograd.grad(net(between).sum(), between, create_graph=True)
        slope = (gradient.flatten(1).norm(dim=1) - 1).square()
        return net(made).mean() - net(true).mean() + 10 * slope.mean()

    return Network(model, records, step)


class _Coupling(nn.Module):
    """A flow of affine couplings."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 6)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        volume = x.new_zeros(len(x))
        for layer in self.layers:
            kept, moved = x.chunk(2, 1)
            scale, shift = layer(kept).chunk(2, 1)
            scale = scale.tanh()
            x = torch.cat([moved * scale.exp() + shift, kept], 1)
            volume = volume + scale.sum(1)
        return volume - x.square().sum(1) / 2


def _flow(model: nn.Module) -> Network:
    records = [(torch.randn(6),) for _ in range(RECORDS)]
    return Network(model, records, lambda net, batch: -net(batch[0]).mean())


# ----------------------------------------------------------------------------- physics, and others


def _pinn() -> Network:
    """The heat equation, at a point of a record, and the value that was measured there."""
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def step(net: nn.Module, batch: Any) -> Tensor:
        point, value = batch
        point = point.clone().requires_grad_(True)
        u = net(point)[:, 0]
        (first,) = torch.autograd.grad(u.sum(), point, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), point, create_graph=True)
        residual = first[:, 1] - second[:, 0]
        return (residual.square() + (u - value).square()).mean()

    return Network(model, [(torch.rand(2), torch.randn(())) for _ in range(RECORDS)], step)


class _Equilibrium(nn.Module):
    """A fixed point, found without a graph; then one step with it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 8)
        self.outside = nn.Linear(6, 8)
        self.out = nn.Linear(8, CLASSES)
        with torch.no_grad():
            self.inside.weight *= 0.5

    def forward(self, x: Tensor) -> Tensor:
        drive = self.outside(x)
        with torch.no_grad():
            z = torch.zeros_like(drive)
            for _ in range(30):
                z = (self.inside(z) + drive).tanh()
        return self.out((self.inside(z) + drive).tanh())


class _Hyper(nn.Module):
    """Another network makes the weights of each record's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Linear(6, 6 * 8)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.maker(x).view(-1, 8, 6)
        return self.out(torch.einsum("boi,bi->bo", weights, x).tanh())


def _classifier(model: nn.Module, *shape: int) -> Network:
    return Network(model, [(torch.randn(*shape), label()) for _ in range(RECORDS)], cross_entropy)


class _Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(20, 4)
        self.films = nn.Embedding(30, 4)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, user: Tensor, film: Tensor) -> Tensor:
        return (self.users(user) * self.films(film)).sum(1) + self.bias


def _matrix_factorization() -> Network:
    records = [(torch.randint(0, 20, ()), torch.randint(0, 30, ()), 5 * torch.rand(())) for _ in range(RECORDS)]
    return Network(_Factors(), records, lambda net, batch: F.mse_loss(net(batch[0], batch[1]), batch[2]))


def _encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))


def _margin(net: nn.Module, batch: Any) -> Tensor:
    anchor, like, unlike = map(net, batch)
    return F.triplet_margin_loss(anchor, like, unlike, margin=5.0)


def _triplet() -> Network:
    records = [tuple(torch.randn(6) for _ in range(3)) for _ in range(RECORDS)]
    return Network(_encoder(), records, _margin)


def _contrast() -> Network:
    """Each view has to find its other one among those of all records."""

    def step(net: nn.Module, batch: Any) -> Tensor:
        one, other = (F.normalize(net(view), dim=1) for view in batch)
        return F.cross_entropy(one @ other.t() / 0.5, torch.arange(len(one)))

    return Network(_encoder(), [(torch.randn(6), torch.randn(6)) for _ in range(RECORDS)], step)


_BUILDERS: dict[str, Callable[[], Network]] = {
    "BidirectionalLSTM": _bidirectional_lstm,
    "GRUWithAttention": _gru_with_attention,
    "TemporalConvolutions": _temporal_convolutions,
    "LSTMForCTC": _lstm_for_ctc,
    "UNet": _unet,
    "UNetWithBatchNorm": lambda: _unet(nn.BatchNorm2d),
    "Diffusion": lambda: _diffusion(draws=False),
    "DiffusionThatDraws": lambda: _diffusion(draws=True),
    "VAE": lambda: _vae(draws=False),
    "VAEThatDraws": lambda: _vae(draws=True),
    "VQVAE": _vq_vae,
    "WassersteinCritic": lambda: _critic(penalty=True),
    "SpectralCritic": lambda: _critic(penalty=False),
    "RealNVP": lambda: _flow(_Coupling()),
    "PINN": _pinn,
    "DeepEquilibrium": lambda: _classifier(_Equilibrium(), 6),
    "HyperNetwork": lambda: _classifier(_Hyper(), 6),
    "MatrixFactorization": _matrix_factorization,
    "SiameseTriplet": _triplet,
    "SimCLR": _contrast,
}
