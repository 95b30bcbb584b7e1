"""The `networks` section: how observations are encoded, and what actors and critics see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, Strict, field_validator, model_validator

from rl_training.validation import StrictModel

Size = Annotated[int, Field(ge=1, le=65536)]
Sizes = Annotated[tuple[Size, ...], Strict(False), Field(max_length=64)]
LeafNames = Annotated[list[str], Field(min_length=1, max_length=1000)]
ImageEncoderName = Literal["nature", "impala", "drq"]
EncoderName = Literal["identity", "mlp", "one_hot", "embedding", "nature", "impala", "drq"]
ChannelAxis = Literal["auto", "first", "last"]

IMAGE_ENCODERS: tuple[str, ...] = ("nature", "impala", "drq")
USED_BY: Mapping[str, frozenset[str]] = {
    "identity": frozenset(),
    "mlp": frozenset({"hidden_sizes", "feature_size"}),
    "one_hot": frozenset(),
    "embedding": frozenset({"embedding_size"}),
    **dict.fromkeys(IMAGE_ENCODERS, frozenset({"feature_size", "channels"})),
}
"""The settings that each encoder has"""


class EncoderSettings(StrictModel):
    """The encoder of one part of an observation, instead of the default one."""

    encoder: EncoderName
    """`identity` and `mlp` are for numbers, `one_hot` and `embedding` for discrete values,
    `nature`, `impala` and `drq` for images, also for images of floating-point numbers"""
    feature_size: Size | None = None
    """Outputs of `mlp` or of an image encoder. Not set: 64 of `mlp`, 512 of `nature`, 256 of
    `impala`, 50 of `drq`"""
    hidden_sizes: Sizes = ()
    """Units of the hidden layers of `mlp`"""
    embedding_size: Size = 64
    """Numbers that `embedding` learns for each discrete value"""
    channels: ChannelAxis = "auto"
    """Whether the channels of an image are its `first` or `last` axis. `auto`: the shorter of the
    two, and the last one if they are equal"""

    @model_validator(mode="after")
    def _check_used(self) -> Self:
        for name, field in type(self).model_fields.items():
            # A saved section has every setting, so that a default does not count as given.
            is_given = name != "encoder" and getattr(self, name) != field.default
            if is_given and name not in USED_BY[self.encoder]:
                raise ValueError(f"{name}: the encoder {self.encoder!r} has no such setting")
        return self


class NetworkSettings(StrictModel):
    """How networks read observations. Vectors of numbers need none of it."""

    image_encoder: ImageEncoderName = "nature"
    """Encoder of images: Nature's (doi:10.1038/nature14236), IMPALA's residual one (1802.01561) or
    DrQ's (2004.13649)"""
    encoders: dict[str, EncoderSettings] = Field(default_factory=dict)
    """Other encoders of single parts, by the part's name: that of an encoder, or a mapping. A
    single array has the name `observation`"""
    actor_obs: LeafNames | None = None
    """Parts of an observation that the actor sees. Not set: all"""
    critic_obs: LeafNames | None = None
    """Parts of an observation that the critics see. Not set: all"""
    shared_encoder: bool = False
    """The actor uses the features of the critics' encoder and does not train it, as in DrQ"""
    random_shift: Annotated[int, Field(ge=0, le=64)] = 0
    """Shift the images of each minibatch by up to this number of pixels in each direction, as in
    DrQ, whose value is 4; 0: no shifts"""

    @field_validator("encoders", mode="before")
    @classmethod
    def _accept_names(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {k: {"encoder": v} if isinstance(v, str) else v for k, v in value.items()}

    @model_validator(mode="after")
    def _check_sharing(self) -> Self:
        if self.shared_encoder and self.actor_obs != self.critic_obs:
            raise ValueError(
                "shared_encoder = True: actor_obs and critic_obs must be equal, because the actor "
                "uses the features of the critics' encoder"
            )
        return self
