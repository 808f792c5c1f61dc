"""Where the sizes of models were: `appliance.terms.shapes`. Remove when: nothing imports them from here."""

from appliance.terms.shapes import KNOWN, ModelShape, read_shape

__all__ = ["KNOWN", "ModelShape", "read_shape"]
