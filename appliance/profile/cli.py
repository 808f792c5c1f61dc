"""The commands `profile`, `setup` and `convert-profile`. Each imports what it needs when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from appliance.errors import RecipeError
from appliance.terms.schemes import Scheme

_RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A file, or the name of a shipped recipe.")]
_SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key, such as rollout.scheme=int8.")
]


def add_commands(app: typer.Typer) -> None:
    """Register the commands of this room."""
    app.command("profile")(_profile)
    app.command("setup")(_setup)
    app.command("convert-profile")(_convert)


def _profile(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="A file, or the name of a shipped recipe.")
    ] = None,
    sets: _SetOption = None,
    output: Annotated[Path | None, typer.Option("-o", metavar="DIR", help="Where it goes; else the cache.")] = None,
    model: Annotated[str | None, typer.Option(help="FlashRL's form: the BF16 checkpoint.")] = None,
    quantized: Annotated[Path | None, typer.Option(help="FlashRL's form: a W8A8 checkpoint of that model.")] = None,
    scheme: Annotated[
        str | None, typer.Option(help="FlashRL's form: the scheme of the W8A8 checkpoint, int8 by default.")
    ] = None,
) -> None:
    """A model's scales: of a recipe's model, or out of a donor checkpoint."""
    if recipe is not None and model is None and quantized is None:
        if scheme is not None:
            hint = f"use --set rollout.scheme={scheme}"
            raise RecipeError([(f"--scheme {scheme}: a recipe's scheme is its rollout.scheme", hint)])
        from appliance.profile.command import run_profile
        from appliance.recipe.load import load_recipe

        raise typer.Exit(run_profile(load_recipe(recipe, sets=sets or ()), output=output))
    if recipe is not None or model is None or quantized is None or output is None:
        hint = "use `appliance profile RECIPE`, or `appliance profile --model M --quantized Q --scheme int8 -o DIR`"
        raise RecipeError([("profile: give a recipe, or --model, --quantized and -o", hint)])
    if sets:
        raise RecipeError([(f"--set {each}: there is no recipe to set it in", "leave it out") for each in sets])
    scheme = scheme or str(Scheme.INT8)
    if scheme not in list(Scheme):
        legal = ", ".join(f"`{each}`" for each in Scheme)
        raise RecipeError([(f"--scheme: unknown value `{scheme}`", f"use one of {legal}")])
    from appliance.profile.command import run_donor

    raise typer.Exit(run_donor(model=model, quantized=quantized, scheme=Scheme(scheme), output=output))


def _setup(
    recipe: _RecipeArgument,
    sets: _SetOption = None,
    output: Annotated[Path, typer.Option("-o", metavar="FILE", help="The YAML file.")] = Path("quantization.yaml"),
) -> None:
    """Write quantization.yaml, which FLASHRL_CONFIG takes, with a profile of the recipe's model beside it."""
    from appliance.profile.command import run_setup
    from appliance.recipe.load import load_recipe

    raise typer.Exit(run_setup(load_recipe(recipe, sets=sets or ()), output=output))


def _convert(
    file: Annotated[Path, typer.Argument(metavar="FILE.pt", help="What `flashrl profile --fn int8` wrote.")],
    output: Annotated[Path, typer.Option("-o", metavar="DIR", help="Where the profile goes.")],
) -> None:
    """Turn FlashRL's profile.pt, a pickle, into a profile. Nothing in the pickle is run."""
    from appliance.profile.convert import run_convert

    raise typer.Exit(run_convert(file, output=output))
