"""Packed blocks are decoded on the device to the host's bits, and nobody waits."""

import pytest
import torch

from gpu.places import ON_GPU
from stagehand.core.layout import layout_of, same_bits
from stagehand.stores.packing import pack, pack_image
from stagehand.stores.unpacking import decoder_of, unpack_image, unpack_into


def weights(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).mul_(0.02).bfloat16()


def patterns() -> torch.Tensor:
    """Return all bit patterns among normal weights."""
    words = torch.cat(
        [torch.arange(1 << 16).to(torch.int16), weights(1 << 22).view(torch.int16)]
    )
    generator = torch.Generator().manual_seed(0)
    return words[torch.randperm(words.numel(), generator=generator)].view(
        torch.bfloat16
    )


def test_block_is_decoded_to_the_bits_of_the_host(place):
    tensors = [weights(1000, 999), torch.arange(11), patterns(), weights(17)]
    layout = layout_of([(str(index), tensor) for index, tensor in enumerate(tensors)])
    image = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.pack(tensors, image)
    form, wire = pack_image(image, layout)
    assert len(form.packed) == 2
    found = torch.full_like(image, 7, device=place.name)
    unpack_image(wire.to(place.name), form, found)
    for view, tensor in zip(layout.views(found.cpu()), tensors, strict=True):
        assert same_bits(view, tensor)


def test_tensor_is_decoded_to_the_bits_of_the_host(place):
    tensor = patterns()
    packed = pack(tensor)
    found = torch.zeros_like(tensor, device=place.name)
    unpack_into(packed.stream.to(place.name), packed.header, found)
    assert same_bits(found.cpu(), tensor)


@pytest.mark.parametrize("place", [ON_GPU], indirect=True)
def test_gpu_decodes_with_kernels(place):
    assert decoder_of(place.name) is not None
