"""Networks in plain torch, as papers and tutorials have them: parts by name, and a step that computes with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tools.zoo.network import CLASSES, RECORDS, Network, Step, cross_entropy, label, tokens

_LENGTH = 9
_SIDE = 8


def build(name: str, *_: object) -> Network:
    """A network of that name."""
    return _BUILDERS[name]()


def _network(
    model: nn.Module | Mapping[str, nn.Module], record: Callable[[], Any], step: Step, **facts: Any
) -> Network:
    parts = model if isinstance(model, nn.Module) else nn.ModuleDict(model)
    return Network(parts, [record() for _ in range(RECORDS)], step, **facts)


def _picture() -> Tensor:
    return torch.randn(1, _SIDE, _SIDE)


# ------------------------------------------------------------------------------------------- series


def _bidirectional_lstm() -> Network:
    parts = {
        "words": nn.Embedding(60, 8),
        "lstm": nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True),
        "tags": nn.Linear(16, CLASSES),
    }
    lengths_of_records = iter(range(3, 3 + RECORDS))

    def record() -> Any:
        return tokens(_LENGTH), torch.tensor(next(lengths_of_records)), torch.randint(0, CLASSES, (_LENGTH,))

    def step(net: Any, batch: Any) -> Tensor:
        words, lengths, tags = batch
        packed = pack_padded_sequence(net.words(words), lengths.cpu(), batch_first=True, enforce_sorted=False)
        output, _ = pad_packed_sequence(net.lstm(packed)[0], batch_first=True, total_length=words.shape[1])
        loss = F.cross_entropy(net.tags(output).transpose(1, 2), tags, reduction="none")
        is_word = torch.arange(words.shape[1]) < lengths[:, None]
        return ((loss * is_word).sum(1) / lengths).mean()

    return _network(parts, record, step)


def _gru_with_attention() -> Network:
    parts = {
        "words": nn.Embedding(60, 8),
        "encoder": nn.GRU(8, 8, batch_first=True),
        "decoder": nn.GRUCell(16, 8),
        "out": nn.Linear(8, 60),
    }

    def step(net: Any, batch: Any) -> Tensor:
        source, target = batch
        memory, last = net.encoder(net.words(source))
        state = last[0]
        scores = []
        for word in net.words(target[:, :-1]).unbind(1):
            weights = torch.einsum("bth,bh->bt", memory, state).softmax(1)
            context = torch.einsum("bt,bth->bh", weights, memory)
            state = net.decoder(torch.cat([word, context], 1), state)
            scores.append(net.out(state))
        return F.cross_entropy(torch.stack(scores, 2), target[:, 1:])

    return _network(parts, lambda: (tokens(_LENGTH), tokens(5)), step)


def _temporal_convolutions() -> Network:
    layers: list[nn.Module] = []
    for before, after, dilation in ((1, 8, 1), (8, 8, 2), (8, 8, 4)):
        convolution = nn.Conv1d(before, after, 3, dilation=dilation)
        layers += [nn.ConstantPad1d((2 * dilation, 0), 0.0), parametrizations.weight_norm(convolution), nn.ReLU()]

    def step(net: Any, batch: Any) -> Tensor:
        (x,) = batch
        return F.mse_loss(net(x[..., :-1]), x[..., 1:])

    return _network(nn.Sequential(*layers, nn.Conv1d(8, 1, 1)), lambda: (torch.randn(1, 20),), step)


def _lstm_for_ctc() -> Network:
    def step(net: Any, batch: Any) -> Tensor:
        x, labels = batch
        scores = net.out(net.lstm(x.transpose(0, 1))[0]).log_softmax(-1)
        of_frames = torch.full((len(x),), x.shape[1])
        of_labels = torch.full((len(x),), labels.shape[1])
        return F.ctc_loss(scores, labels, of_frames, of_labels)

    parts = {"lstm": nn.LSTM(6, 8, bidirectional=True), "out": nn.Linear(16, 20)}
    return _network(parts, lambda: (torch.randn(15, 6), torch.randint(1, 20, (4,))), step)


# --------------------------------------------------------------------------------------- generation


class _UNet(nn.Module):
    """Of two resolutions, with the time of a diffusion where one is given."""

    def __init__(self, norm: Callable[[int], nn.Module], outputs: int) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), norm(8), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), norm(16), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Sequential(nn.Conv2d(16, 8, 3, padding=1), norm(8), nn.ReLU(), nn.Conv2d(8, outputs, 1))

    def forward(self, x: Tensor, time: Tensor | float = 0.0) -> Tensor:
        high = self.down(x)
        return self.out(torch.cat([high, self.up(self.middle(high) + time)], 1))


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


def _unet(norm: Callable[[int], nn.Module]) -> Network:
    labels = (_SIDE, _SIDE)
    return _network(_UNet(norm, CLASSES), lambda: (_picture(), torch.randint(0, CLASSES, labels)), cross_entropy)


def _diffusion(draws: bool) -> Network:
    parts = {
        "unet": _UNet(_group_norm, 1),
        "time": nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16)),
    }

    def step(net: Any, batch: Any) -> Tensor:
        x = batch[0]
        time, noise = (torch.rand(len(x)), torch.randn_like(x)) if draws else batch[1:]
        share = time.view(-1, 1, 1, 1)
        angles = time[:, None] * 2.0 ** torch.arange(4)
        embedded = net.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
        return F.mse_loss(net.unet((1 - share).sqrt() * x + share.sqrt() * noise, embedded), noise)

    return _network(parts, lambda: (_picture(), torch.rand(()), _picture())[: 1 if draws else 3], step, is_random=draws)


def _vae(draws: bool) -> Network:
    parts = {
        "encoder": nn.Sequential(nn.Flatten(), nn.Linear(_SIDE**2, 16), nn.ReLU(), nn.Linear(16, 8)),
        "decoder": nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, _SIDE**2)),
    }

    def step(net: Any, batch: Any) -> Tensor:
        x = batch[0]
        noise = torch.randn(len(x), 4) if draws else batch[1]
        mean, log_variance = net.encoder(x).chunk(2, 1)
        guess = net.decoder(mean + noise * (log_variance / 2).exp())
        likelihood = F.binary_cross_entropy_with_logits(guess, x.flatten(1), reduction="none").sum(1)
        divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum(1) / 2
        return (likelihood + divergence).mean()

    return _network(
        parts, lambda: (torch.rand(1, _SIDE, _SIDE), torch.randn(4))[: 1 if draws else 2], step, is_random=draws
    )


def _vq_vae() -> Network:
    parts = {
        "encoder": nn.Conv2d(1, 4, 4, stride=4),
        "codes": nn.Embedding(8, 4),
        "decoder": nn.ConvTranspose2d(4, 1, 4, stride=4),
    }

    def step(net: Any, batch: Any) -> Tensor:
        (x,) = batch
        z = net.encoder(x).permute(0, 2, 3, 1)
        distances = (z[..., None, :] - net.codes.weight).square().sum(-1)
        code = net.codes(distances.argmin(-1))
        pull = (code - z.detach()).square() + 0.25 * (z - code.detach()).square()
        straight = z + (code - z).detach()
        return F.mse_loss(net.decoder(straight.permute(0, 3, 1, 2)), x) + pull.mean()

    return _network(parts, lambda: (_picture(),), step)


def _critic(first: nn.Module, last: nn.Module, step: Step) -> Network:
    """The critic's step, with what a generator has made in the records."""
    model = nn.Sequential(first, nn.LeakyReLU(0.2), nn.Flatten(), last)
    return _network(model, lambda: (_picture(), _picture(), torch.rand(1, 1, 1)), step)


def _hinge(net: nn.Module, batch: Any) -> Tensor:
    true, made, _ = batch
    return F.relu(1 - net(true)).mean() + F.relu(1 + net(made)).mean()


def _penalty(net: nn.Module, batch: Any) -> Tensor:
    true, made, share = batch
    between = (share * true + (1 - share) * made).requires_grad_(True)
    (gradient,) = torch.autograd.grad(net(between).sum(), between, create_graph=True)
    slope = (gradient.flatten(1).norm(dim=1) - 1).square()
    return net(made).mean() - net(true).mean() + 10 * slope.mean()


def _spectral_critic() -> Network:
    first = parametrizations.spectral_norm(nn.Conv2d(1, 4, 3, stride=2))
    return _critic(first, parametrizations.spectral_norm(nn.Linear(36, 1)), _hinge)


def _flow() -> Network:
    """A flow of affine couplings."""
    model = nn.ModuleList(nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 6)) for _ in range(3))

    def step(net: Any, batch: Any) -> Tensor:
        (x,) = batch
        volume = x.new_zeros(len(x))
        for layer in net:
            kept, moved = x.chunk(2, 1)
            scale, shift = layer(kept).chunk(2, 1)
            scale = scale.tanh()
            x = torch.cat([moved * scale.exp() + shift, kept], 1)
            volume = volume + scale.sum(1)
        return (x.square().sum(1) / 2 - volume).mean()

    return _network(model, lambda: (torch.randn(6),), step)


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

    return _network(model, lambda: (torch.rand(2), torch.randn(())), step)


def _equilibrium() -> Network:
    """A fixed point, found without a graph; then one step with it."""
    inside = nn.Linear(8, 8)
    nn.init.uniform_(inside.weight, -0.18, 0.18)

    def step(net: Any, batch: Any) -> Tensor:
        x, y = batch
        drive = net.outside(x)
        with torch.no_grad():
            z = torch.zeros_like(drive)
            for _ in range(30):
                z = (net.inside(z) + drive).tanh()
        return F.cross_entropy(net.out((net.inside(z) + drive).tanh()), y)

    parts = {"inside": inside, "outside": nn.Linear(6, 8), "out": nn.Linear(8, CLASSES)}
    return _network(parts, lambda: (torch.randn(6), label()), step)


def _hyper_network() -> Network:
    """Another network makes the weights of each record's layer."""

    def step(net: Any, batch: Any) -> Tensor:
        x, y = batch
        weights = net.maker(x).view(-1, 8, 6)
        return F.cross_entropy(net.out(torch.einsum("boi,bi->bo", weights, x).tanh()), y)

    parts: dict[str, nn.Module] = {"maker": nn.Linear(6, 6 * 8), "out": nn.Linear(8, CLASSES)}
    return _network(parts, lambda: (torch.randn(6), label()), step)


class _Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(20, 4)
        self.films = nn.Embedding(30, 4)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, user: Tensor, film: Tensor) -> Tensor:
        return (self.users(user) * self.films(film)).sum(1) + self.bias


def _matrix_factorization() -> Network:
    return _network(
        _Factors(),
        lambda: (torch.randint(0, 20, ()), torch.randint(0, 30, ()), 5 * torch.rand(())),
        lambda net, batch: F.mse_loss(net(batch[0], batch[1]), batch[2]),
    )


def _compared(views: int, step: Step) -> Network:
    """An encoder of several views in a record."""
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
    return _network(model, lambda: torch.randn(views, 6).unbind(), step)


def _margin(net: nn.Module, batch: Any) -> Tensor:
    anchor, like, unlike = map(net, batch)
    return F.triplet_margin_loss(anchor, like, unlike, margin=5.0)


def _contrast(net: nn.Module, batch: Any) -> Tensor:
    """Each view has to find its other one among those of all records."""
    one, other = (F.normalize(net(view), dim=1) for view in batch)
    return F.cross_entropy(one @ other.t() / 0.5, torch.arange(len(one)))


_BUILDERS: dict[str, Callable[[], Network]] = {
    "BidirectionalLSTM": _bidirectional_lstm,
    "GRUWithAttention": _gru_with_attention,
    "TemporalConvolutions": _temporal_convolutions,
    "LSTMForCTC": _lstm_for_ctc,
    "UNet": lambda: _unet(_group_norm),
    "UNetWithBatchNorm": lambda: _unet(nn.BatchNorm2d),
    "Diffusion": lambda: _diffusion(draws=False),
    "DiffusionThatDraws": lambda: _diffusion(draws=True),
    "VAE": lambda: _vae(draws=False),
    "VAEThatDraws": lambda: _vae(draws=True),
    "VQVAE": _vq_vae,
    "WassersteinCritic": lambda: _critic(nn.Conv2d(1, 4, 3, stride=2), nn.Linear(36, 1), _penalty),
    "SpectralCritic": _spectral_critic,
    "RealNVP": _flow,
    "PINN": _pinn,
    "DeepEquilibrium": _equilibrium,
    "HyperNetwork": _hyper_network,
    "MatrixFactorization": _matrix_factorization,
    "SiameseTriplet": lambda: _compared(3, _margin),
    "SimCLR": lambda: _compared(2, _contrast),
}
