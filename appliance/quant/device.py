"""Where the devices' table was: `appliance.terms.devices`. Remove when: nothing imports it from here."""

from appliance.terms.devices import (
    AUTO,
    CPU,
    DEVICES,
    GPUS,
    PAYS_FROM,
    Gpu,
    StoredResult,
    automatic_scheme,
    gpu_of_product,
    why_not,
)

__all__ = [
    "AUTO",
    "CPU",
    "DEVICES",
    "GPUS",
    "PAYS_FROM",
    "Gpu",
    "StoredResult",
    "automatic_scheme",
    "gpu_of_product",
    "why_not",
]
