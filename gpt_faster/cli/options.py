"""What a command was asked for: the user's flags, over what the model's files state, over defaults.

    options = Options.parse(build_parser(), argv)              # argv is read once
    options = options.over(source.defaults)                    # generation_config.json's
    options.temperature
"""

import argparse


class Options:
    """Values by name, which nobody changes: replaced() gives others."""

    def __init__(self, given: dict, defaults: dict, stated: dict | None = None):
        """given: by the user; stated: by the model's files; of both, only names in `defaults`."""
        names = defaults.keys()
        stated = {name: value for name, value in (stated or {}).items() if name in names}
        values = {**defaults, **stated, **given}
        vars(self).update(given=given, defaults=defaults, stated=stated, values=values)

    @classmethod
    def parse(cls, parser: argparse.ArgumentParser, argv: list[str] | None = None) -> "Options":
        """What argv says, and the parser's defaults for the rest. Exits where argparse does."""
        silent = []                                # argparse copies it before it appends
        actions = [a for a in parser._actions if a.dest != argparse.SUPPRESS]
        actions = [a for a in actions if a.default is not argparse.SUPPRESS]
        found = vars(parser.parse_args(argv, argparse.Namespace(**{
            action.dest: silent for action in actions})))
        defaults = {name: parser.get_default(name) for name in found}
        return cls({name: value for name, value in found.items() if value is not silent}, defaults)

    def over(self, stated: dict) -> "Options":
        """With the values that a model's files state, where the user is silent."""
        return Options(self.given, self.defaults, stated)

    def replaced(self, **values) -> "Options":
        """With these in place of whatever was given, stated or the default."""
        return Options({**self.given, **values}, {**self.defaults, **values}, self.stated)

    def __getattr__(self, name: str):
        try:
            return vars(self)["values"][name]
        except KeyError:
            raise AttributeError(f"no flag is called {name}") from None

    def __setattr__(self, name: str, value):
        raise AttributeError(f"{name}: options are not changed, see replaced()")

    def __repr__(self) -> str:
        return f"Options({self.values})"
