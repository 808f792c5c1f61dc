"""Where the schemes were: `appliance.terms.schemes`. Remove when: nothing imports them from here."""

from appliance.terms.schemes import Scheme

__all__ = ["Scheme"]
