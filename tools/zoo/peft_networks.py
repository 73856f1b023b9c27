"""Networks of transformers that peft freezes but for a few parameters of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tools.zoo import transformers_networks
from tools.zoo.architectures import ZOO
from tools.zoo.network import Network

_LAYERS_OF_LLAMA = ["q_proj", "v_proj"]
_BASES = {
    "GPT-2": ("GPT2LMHeadModel", "causal language modelling", ["c_attn", "c_proj"], "CAUSAL_LM"),
    "BERT": ("BertForSequenceClassification", "classification", ["query", "value"], "SEQ_CLS"),
    "": ("LlamaForCausalLM", "causal language modelling", _LAYERS_OF_LLAMA, "CAUSAL_LM"),
}
"""Word of the step → network, what it is trained for, layers that are adapted, and the task's name in peft."""
_OF_THE_INPUT = ("PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig")


def build(name: str, step: str, *_: object) -> Network:
    """A network with the parameters that a configuration of peft adds."""
    import peft

    base, step_of_base, layers, task = next(_BASES[word] for word in _BASES if word in step)
    network = transformers_networks.build(base, step_of_base)
    if name == "BitFit":
        for parameter_name, parameter in network.model.named_parameters():
            parameter.requires_grad = parameter_name.endswith("bias") or parameter_name.startswith("classifier")
        return network
    options = {"task_type": task, **ZOO["options"].get(name, {})}
    if name not in _OF_THE_INPUT:
        options.setdefault("target_modules", layers)
    if "DoRA" in step:
        options["use_dora"] = True
    if name == "XLoraConfig":
        return _mixture_of_loras(network)
    network.model = peft.get_peft_model(network.model, getattr(peft, name)(**options))
    _moved(network.model)
    return network


def _moved(model: nn.Module) -> None:
    """Move what is trained away from where it begins, which is often zero, so that all of it has a gradient."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))


def _mixture_of_loras(network: Network) -> Network:
    import tempfile

    import peft

    with tempfile.TemporaryDirectory() as folder:
        adapters = {}
        for number in range(2):
            made = transformers_networks.build("LlamaForCausalLM", "causal language modelling").model
            lora = peft.get_peft_model(
                made, peft.LoraConfig(r=2, target_modules=_LAYERS_OF_LLAMA, task_type="CAUSAL_LM")
            )
            _moved(lora)
            place = f"{folder}/{number}"
            lora.save_pretrained(place)
            adapters[str(number)] = place
        options: Any = {"hidden_size": 16, "xlora_depth": 1, "adapters": adapters, "task_type": "CAUSAL_LM"}
        network.model = peft.get_peft_model(network.model, peft.XLoraConfig(**options))
    return network
