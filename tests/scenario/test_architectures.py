"""Real models stream exactly and within their budget, and are given back whole."""

from copy import deepcopy

import pytest
import torch
from architectures import ARCHITECTURES, assert_bitwise_equal, flatten, to_device
from safetensors.torch import save_file, save_model

import streamed as S
