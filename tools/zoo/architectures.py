"""The list of the zoo. It was committed before any of it was tried, and nothing is taken off because it fails."""

from __future__ import annotations

from typing import NamedTuple


class Architecture(NamedTuple):
    """What is trained.

    Attributes:
        name: Of its class or function in the library.
        family: Of the table.
        library: That it comes from; "own" are written for the zoo in plain torch.
        step: What it is trained for.
        private: Whether its step is a function of each record, so that it should be trained; else refusing is right.
    """

    name: str
    family: str
    library: str
    step: str
    private: bool = True


def _all(family: str, library: str, step: str, names: str, private: bool = True) -> list[Architecture]:
    return [Architecture(name, family, library, step, private) for name in names.split()]


_CLASSIFICATION = "classification"
_LANGUAGE = "causal language modelling"
_MASKED = "masked language modelling"
_TOKENS = "token classification"
_SEQ2SEQ = "sequence to sequence"
_SEGMENTATION = "segmentation"
_DETECTION = "detection"
_FORECAST = "forecast"

ARCHITECTURES = [
    # Encoders of text.
    *_all(
        "text: encoders",
        "transformers",
        _CLASSIFICATION,
        "BertForSequenceClassification DistilBertForSequenceClassification RobertaForSequenceClassification "
        "AlbertForSequenceClassification DebertaV2ForSequenceClassification MobileBertForSequenceClassification "
        "SqueezeBertForSequenceClassification MPNetForSequenceClassification ConvBertForSequenceClassification "
        "FunnelForSequenceClassification LongformerForSequenceClassification BigBirdForSequenceClassification "
        "XLNetForSequenceClassification ReformerForSequenceClassification CanineForSequenceClassification "
        "XLMForSequenceClassification IBertForSequenceClassification",
    ),
    *_all(
        "text: encoders",
        "transformers",
        _MASKED,
        "BertForMaskedLM FNetForMaskedLM NystromformerForMaskedLM PerceiverForMaskedLM ModernBertForMaskedLM "
        "RoFormerForMaskedLM DebertaForMaskedLM EsmForMaskedLM YosoForMaskedLM",
    ),
    *_all(
        "text: encoders",
        "transformers",
        _TOKENS,
        "ElectraForTokenClassification XLMRobertaForTokenClassification LayoutLMForTokenClassification",
    ),
    *_all("text: encoders", "transformers", "question answering", "BertForQuestionAnswering"),
    *_all("text: encoders", "transformers", "multiple choice", "BertForMultipleChoice"),
    # Decoders of text.
    *_all(
        "text: decoders",
        "transformers",
        _LANGUAGE,
        "GPT2LMHeadModel GPTNeoForCausalLM GPTNeoXForCausalLM GPTJForCausalLM OPTForCausalLM BloomForCausalLM "
        "LlamaForCausalLM MistralForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM GemmaForCausalLM Gemma2ForCausalLM "
        "Gemma3ForCausalLM PhiForCausalLM Phi3ForCausalLM FalconForCausalLM StableLmForCausalLM Olmo2ForCausalLM "
        "Starcoder2ForCausalLM CohereForCausalLM MptForCausalLM CTRLLMHeadModel OpenAIGPTLMHeadModel "
        "GPTBigCodeForCausalLM XGLMForCausalLM",
    ),
    # Mixtures of experts.
    *_all(
        "mixtures of experts",
        "transformers",
        _LANGUAGE,
        "MixtralForCausalLM Qwen2MoeForCausalLM Qwen3MoeForCausalLM OlmoeForCausalLM DeepseekV3ForCausalLM "
        "GraniteMoeForCausalLM JetMoeForCausalLM GptOssForCausalLM PhimoeForCausalLM DbrxForCausalLM",
    ),
    *_all("mixtures of experts", "transformers", _SEQ2SEQ, "SwitchTransformersForConditionalGeneration"),
    # Of the records of a lot together: the loss of each alone is another function than that of the lot.
    *_all("mixtures of experts", "transformers", "with a loss that balances the experts", "MixtralForCausalLM"),
    # State spaces and recurrence.
    *_all(
        "state spaces",
        "transformers",
        _LANGUAGE,
        "MambaForCausalLM Mamba2ForCausalLM FalconMambaForCausalLM JambaForCausalLM BambaForCausalLM "
        "Zamba2ForCausalLM RecurrentGemmaForCausalLM RwkvForCausalLM FalconH1ForCausalLM xLSTMForCausalLM "
        "Lfm2ForCausalLM Qwen3NextForCausalLM",
    ),
    # From sequence to sequence.
    *_all(
        "text: sequence to sequence",
        "transformers",
        _SEQ2SEQ,
        "T5ForConditionalGeneration BartForConditionalGeneration MarianMTModel PegasusForConditionalGeneration "
        "MBartForConditionalGeneration LEDForConditionalGeneration ProphetNetForConditionalGeneration "
        "M2M100ForConditionalGeneration LongT5ForConditionalGeneration EncoderDecoderModel",
    ),
    # Vision.
    *_all(
        "vision",
        "transformers",
        _CLASSIFICATION,
        "ViTForImageClassification DeiTForImageClassification BeitForImageClassification SwinForImageClassification "
        "Swinv2ForImageClassification ConvNextForImageClassification PoolFormerForImageClassification "
        "ResNetForImageClassification MobileViTForImageClassification LevitForImageClassification "
        "CvtForImageClassification PvtForImageClassification Dinov2ForImageClassification "
        "FocalNetForImageClassification BitForImageClassification HieraForImageClassification "
        "CLIPForImageClassification SiglipForImageClassification VideoMAEForVideoClassification",
    ),
    *_all("vision", "transformers", _SEGMENTATION, "SegformerForSemanticSegmentation UperNetForSemanticSegmentation"),
    *_all("vision", "transformers", "depth", "DPTForDepthEstimation GLPNForDepthEstimation"),
    *_all("vision", "transformers", "reconstruction of masked patches", "ViTMAEForPreTraining"),
    *_all(
        "vision",
        "torchvision",
        _CLASSIFICATION,
        "alexnet vgg11 resnet18 resnext50_32x4d densenet121 squeezenet1_1 googlenet mobilenet_v3_small mnasnet0_5 "
        "shufflenet_v2_x0_5 efficientnet_b0 regnet_y_400mf convnext_tiny vit_b_16 swin_t swin_v2_t maxvit_t r3d_18 "
        "mvit_v1_b",
    ),
    *_all("vision", "torchvision", _SEGMENTATION, "fcn_resnet50 deeplabv3_mobilenet_v3_large"),
    *_all("vision", "torchvision", "optical flow", "raft_small"),
    *_all(
        "vision",
        "timm",
        _CLASSIFICATION,
        "vit_tiny_patch16_224 deit3_small_patch16_224 convnext_atto mixer_s32_224 resmlp_12_224 gmlp_ti16_224 "
        "mobilenetv3_small_050 nfnet_f0 resnetv2_50x1_bit pvt_v2_b0 cait_xxs24_224 xcit_nano_12_p16_224 "
        "beit_base_patch16_224 levit_128s mobilevit_xxs edgenext_xx_small davit_tiny res2net50_26w_4s ghostnet_050 "
        "repvgg_a0 eva02_tiny_patch14_224 tiny_vit_5m_224 convmixer_768_32 crossvit_tiny_240 sequencer2d_s "
        "convit_tiny mambaout_femto starnet_s1 halonet26t lambda_resnet26t",
    ),
    # Detection: each record has as many boxes as it has.
    *_all(
        "detection",
        "torchvision",
        _DETECTION,
        "fasterrcnn_mobilenet_v3_large_320_fpn retinanet_resnet50_fpn ssdlite320_mobilenet_v3_large fcos_resnet50_fpn "
        "maskrcnn_resnet50_fpn",
    ),
    *_all("detection", "transformers", _DETECTION, "DetrForObjectDetection YolosForObjectDetection"),
    *_all("detection", "transformers", _SEGMENTATION, "MaskFormerForInstanceSegmentation"),
    # Several kinds of input.
    *_all("images and text", "transformers", _CLASSIFICATION, "ViltForQuestionAnswering"),
    *_all("images and text", "transformers", "captions", "GitForCausalLM BlipForConditionalGeneration"),
    *_all("images and text", "transformers", "captions", "VisionEncoderDecoderModel LlavaForConditionalGeneration"),
    *_all("images and text", "transformers", _TOKENS, "LayoutLMv3ForTokenClassification"),
    # Speech.
    *_all(
        "speech",
        "transformers",
        "CTC",
        "Wav2Vec2ForCTC SEWForCTC UniSpeechForCTC Data2VecAudioForCTC Wav2Vec2ConformerForCTC Wav2Vec2BertForCTC",
    ),
    *_all(
        "speech",
        "transformers",
        _CLASSIFICATION,
        "HubertForSequenceClassification WavLMForSequenceClassification ASTForAudioClassification",
    ),
    *_all(
        "speech",
        "transformers",
        _SEQ2SEQ,
        "WhisperForConditionalGeneration Speech2TextForConditionalGeneration MoonshineForConditionalGeneration",
    ),
    # Series.
    *_all(
        "series",
        "transformers",
        _FORECAST,
        "PatchTSTForPrediction PatchTSMixerForPrediction InformerForPrediction AutoformerForPrediction "
        "TimeSeriesTransformerForPrediction",
    ),
    *_all("series", "own", "tagging of packed sequences", "BidirectionalLSTM"),
    *_all("series", "own", _SEQ2SEQ, "GRUWithAttention"),
    *_all("series", "own", "forecast by causal convolutions with weight norm", "TemporalConvolutions"),
    *_all("series", "own", "CTC", "LSTMForCTC"),
    # Generation, physics and others.
    *_all("generation", "own", _SEGMENTATION, "UNet UNetWithBatchNorm"),
    *_all("generation", "own", "denoising, noise in the records", "Diffusion"),
    *_all("generation", "own", "denoising, noise drawn in the step", "DiffusionThatDraws"),
    *_all("generation", "own", "evidence bound, noise in the records", "VAE"),
    *_all("generation", "own", "evidence bound, noise drawn in the step", "VAEThatDraws"),
    *_all("generation", "own", "codes, straight through", "VQVAE"),
    *_all("generation", "own", "critic with gradient penalty", "WassersteinCritic"),
    *_all("generation", "own", "critic with spectral norm", "SpectralCritic"),
    *_all("generation", "own", "likelihood", "RealNVP MaskedAutoregressiveFlow"),
    *_all("generation", "own", "score matching by a second derivative", "ScoreMatching"),
    *_all("physics and others", "own", "residual of a differential equation", "PINN"),
    *_all("physics and others", "own", "energy and forces", "InteratomicPotential"),
    *_all("physics and others", "own", _CLASSIFICATION, "NeuralODE DeepEquilibrium HyperNetwork DeepSets"),
    *_all("physics and others", "own", "regression", "KolmogorovArnold NeuralRadianceField"),
    *_all("physics and others", "own", "ratings", "MatrixFactorization"),
    *_all("physics and others", "own", "triplet loss within a record", "SiameseTriplet"),
    # Graphs: a record is a graph, and a lot one large graph.
    *_all(
        "graphs",
        "torch_geometric",
        "classification of graphs",
        "GCNConv GINConv GATv2Conv SAGEConv TransformerConv NNConv PNAConv ResGatedGraphConv TopKPooling",
    ),
    *_all("graphs", "torch_geometric", "classification of padded graphs", "DenseGCNConv"),
    # Parts of a network that is frozen otherwise.
    *_all(
        "peft",
        "peft",
        "on GPT-2",
        "LoraConfig IA3Config PromptTuningConfig PrefixTuningConfig PromptEncoderConfig AdaLoraConfig VeraConfig "
        "LNTuningConfig",
    ),
    *_all("peft", "peft", "DoRA, on Llama", "LoraConfig"),
    *_all(
        "peft",
        "peft",
        "on Llama",
        "LoHaConfig LoKrConfig OFTConfig BOFTConfig FourierFTConfig HRAConfig AdaptionPromptConfig XLoraConfig",
    ),
    *_all("peft", "peft", "on BERT, with a new head", "LoraConfig"),
    *_all("peft", "own", "biases of BERT", "BitFit"),
    # With dropout and stochastic depth as the architecture has them: no reference, they have to train.
    *_all("with dropout", "transformers", _CLASSIFICATION, "BertForSequenceClassification"),
    *_all("with dropout", "transformers", _LANGUAGE, "GPT2LMHeadModel"),
    *_all("with dropout", "transformers", _SEQ2SEQ, "T5ForConditionalGeneration"),
    *_all("with dropout", "transformers", "CTC", "Wav2Vec2ForCTC"),
    *_all("with dropout", "torchvision", _CLASSIFICATION, "convnext_tiny swin_t"),
    # What mixes records: right is to refuse it.
    *_all("mixing records", "transformers", "contrast of the pairs of a lot", "CLIPModel", private=False),
    *_all("mixing records", "torchvision", "classification, BatchNorm as it is", "resnet18", private=False),
    *_all("mixing records", "own", "contrast of the views of a lot", "SimCLR", private=False),
]
