"""What each quantised layer contributes to the mismatch of a model's own samples, all of them by one pass back.

    x_u = sum over positions s of  g_s . e_us      the change of log p(y) that quantising the layer u alone makes
    KL_u = E[x_u^2] / 2                            for words y that are drawn from p; second order in the error

e_us is the error of the layer's output at position s, and g_s the gradient of log p(y) to that output. Drawn words of
different positions are independent given the text, so the products of their gradients vanish in the mean, and the sum
over positions needs no split by words. Source: the Fisher information as the second order of KL; y is drawn from the
model itself, as it has to be (Kunstner et al. 2019, "Limitations of the empirical Fisher approximation").

x_u is the derivative by a factor a_u of the error: a layer puts out its product plus a_u * e_u, and a_u is 0. Layers
are recomputed one at a time, from the inputs that the exact pass has left.

Legend: B sequences of T tokens, H the width of the residual stream, D draws, M rows of a product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from appliance.quant.layer_view import LayerView

Contributions = dict[tuple[str, ...], float]  # by the names of an engine's layer, as in an `ignore` list


def pass_back(
    view: LayerView, *, inputs: Sequence[Tensor], gradients: list[Tensor]
) -> tuple[list[Tensor], Contributions]:
    """Pass back through one layer: return the gradients at its inputs, and E[x^2] / 2 of its layers, summed over
    sequences.

    inputs: [B, T, H] of each batch.  gradients: [D, B, T, H] of each batch, at the layer's outputs.
    """
    codes = view.all_codes()
    factors: dict[tuple[str, ...], Tensor] = {}

    def multiply(
        member: str, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, index: int, sequence_M: Tensor
    ) -> Tensor:
        exact = functional.linear(x, weight_NK, bias_N)
        unit = view.unit_of(member)
        if unit.members[0] not in codes or not x.numel():
            return exact
        with torch.no_grad():
            plain_MN = exact if bias_N is None else exact - bias_N
            error_MN = view.product(x.reshape(-1, x.shape[-1]), codes[unit.members[0]][index], dtype=x.dtype)
            error_MN = error_MN.float() - plain_MN.reshape(error_MN.shape).float()
        factor_M1 = factors[unit.layer][sequence_M][:, None]
        return exact + (factor_M1 * error_MN).to(exact.dtype).view_as(exact)

    before, sums = [], dict.fromkeys((unit.layer for unit in view.units if unit.members[0] in codes), 0.0)
    for number, (hidden_BTH, gradient_DBTH) in enumerate(zip(inputs, gradients, strict=True)):
        factors = {layer: torch.zeros(len(hidden_BTH), requires_grad=True) for layer in sums}
        hidden_BTH = hidden_BTH.detach().requires_grad_()
        with torch.enable_grad():
            (output_BTH,) = view.run([hidden_BTH], multiply=multiply, first=number)
        back_DBTH = torch.empty_like(gradient_DBTH)
        for draw, gradient_BTH in enumerate(gradient_DBTH):
            is_last = draw + 1 == len(gradient_DBTH)
            back_DBTH[draw], *changes = torch.autograd.grad(
                output_BTH, [hidden_BTH, *factors.values()], gradient_BTH, retain_graph=not is_last, allow_unused=True
            )
            for layer, change_B in zip(factors, changes, strict=True):
                if change_B is not None:  # experts that got no token
                    sums[layer] += float(change_B.double().square().sum()) / 2 / len(gradient_DBTH)
        before.append(back_DBTH)
    return before, sums
