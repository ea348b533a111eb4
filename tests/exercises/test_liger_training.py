"""The solutions of the chapter on Liger in a training step."""
import pytest
from torch import nn

from exercises.liger import training


def test_step_speedup():
    assert training.step_speedup(0, 7) == 1 and training.step_speedup(1, 7) == 7
    assert training.step_speedup(0.25, 2) == pytest.approx(8 / 7)
    for total, local in ((1.2, 2.0), (1.2, 4.0), (1.05, 1.5), (1.0, 3.0)):
        assert training.step_speedup(training.needed_share(total, local), local) == pytest.approx(total)
    with pytest.raises(ValueError, match="share must lie in"):
        training.step_speedup(1.5, 2)
    with pytest.raises(ValueError, match="cannot make the whole 3 times as fast"):
        training.needed_share(3, 2)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.Identity()


class Llama(nn.Module):
    """The shape of a Llama: the layers are one level down."""

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([Layer()])


def test_a_guarded_loop_over_nothing_says_nothing(capsys):
    training.silent_patch(Llama())
    assert capsys.readouterr().out == ""
    training.silent_patch(Llama().model)
    assert capsys.readouterr().out == "patched Identity\n"
    assert isinstance(training.first_layer(Llama()), nn.Identity)
    with pytest.raises(AttributeError):
        training.first_layer(Llama().model)
