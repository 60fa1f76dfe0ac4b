"""A published table of layer times becomes a profile; a wrong one gets one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.core.errors import InputError
from dovetail.measure.layer_table import read_layer_table

TABLE = """file,batch,pos,layer,params_json,input_dim,total_us,fw_us,bw_us
a/net.prof,1,0,conv2d,"{""in_channels"":3,""kernel_size"":3,""out_channels"":8}","[3,4,4]",10.0,9,1
a/net.prof,1,1,ReLU2d,{},"[8,4,4]",20.0,5,14
a/net.prof,1,2,flatten,{},"[8,4,4]",2.0,1,1
a/net.prof,1,3,linear,"{""in_features"":128,""out_features"":10}",128,8.0,3,4
a/net.prof,2,0,conv2d,"{""in_channels"":3,""kernel_size"":3,""out_channels"":8}","[3,4,4]",12.0,9,1
a/net.prof,2,1,ReLU2d,{},"[8,4,4]",30.0,5,14
a/net.prof,2,2,flatten,{},"[8,4,4]",2.0,1,1
a/net.prof,2,3,linear,"{""in_features"":128,""out_features"":10}",128,9.0,3,4
"""


def test_what_follows_a_layer_counts_to_it(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(TABLE)
    found = read_layer_table(tmp_path / "t.csv", "net")
    assert [layer.name for layer in found.layers] == ["0.conv2d", "3.linear"]
    conv, linear = found.layers
    assert (conv.parameter_bytes, linear.parameter_bytes) == (4 * (3 * 8 * 9 + 8), 4 * 129 * 10)
    assert (conv.activation_bytes, linear.activation_bytes) == (4 * 128, 40)
    assert conv.forward(1) + conv.backward(1) == pytest.approx(32e-6)
    assert found.forward_time(2) + found.backward_time(2) == pytest.approx(53e-6)
    found.check()


def test_a_missing_column_or_model_or_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(TABLE)
    with pytest.raises(InputError, match="expected rows of a model 'other'"):
        read_layer_table(tmp_path / "t.csv", "other")
    (tmp_path / "short.csv").write_text(TABLE.replace("total_us", "total"))
    with pytest.raises(InputError, match="total_us: missing"):
        read_layer_table(tmp_path / "short.csv", "net")
    with pytest.raises(InputError, match="cannot be read"):
        read_layer_table(tmp_path / "none.csv", "net")
