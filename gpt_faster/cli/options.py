"""A command's options: the user's flags, else the model's defaults, else the parser's.

    options = Options.parse(build_parser(), argv)
    options = options.over(source.defaults)        # generation_config.json
    options.temperature
"""

import argparse


class Options:
    """Immutable values by name; replaced() returns a changed copy."""

    def __init__(self, explicit: dict, defaults: dict, model_defaults: dict | None = None):
        """explicit: from the command line; model_defaults: from the model's files, where names
        outside `defaults` are ignored."""
        names = defaults.keys()
        model_defaults = {name: value for name, value in (model_defaults or {}).items()
                          if name in names}
        values = {**defaults, **model_defaults, **explicit}
        vars(self).update(explicit=explicit, defaults=defaults, model_defaults=model_defaults,
                          values=values)

    @classmethod
    def parse(cls, parser: argparse.ArgumentParser, argv: list[str] | None = None) -> "Options":
        """Parse argv, with the parser's defaults for the rest. Exits like argparse."""
        unset = []                                 # a list: argparse appends to a copy
        actions = [a for a in parser._actions if a.dest != argparse.SUPPRESS]
        actions = [a for a in actions if a.default is not argparse.SUPPRESS]
        parsed = vars(parser.parse_args(argv, argparse.Namespace(**{
            action.dest: unset for action in actions})))
        defaults = {name: parser.get_default(name) for name in parsed}
        return cls({name: value for name, value in parsed.items() if value is not unset}, defaults)

    def over(self, model_defaults: dict) -> "Options":
        """A copy with the model's defaults, which explicit flags override."""
        return Options(self.explicit, self.defaults, model_defaults)

    def replaced(self, **values) -> "Options":
        """A copy with these values."""
        return Options({**self.explicit, **values}, {**self.defaults, **values},
                       self.model_defaults)

    def __getattr__(self, name: str):
        try:
            return vars(self)["values"][name]
        except KeyError:
            raise AttributeError(f"no flag is named {name}") from None

    def __setattr__(self, name: str, value):
        raise AttributeError(f"{name}: options are immutable, see replaced()")

    def __repr__(self) -> str:
        return f"Options({self.values})"
