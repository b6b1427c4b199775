"""Numbers on the command line: the ends of each range."""
import argparse

import pytest

from common import cli


@pytest.mark.parametrize(("kind", "taken", "refused"), [
    (cli.positive_int, ["1", "10"], ["0", "-1", "1.5", "one"]),
    (cli.count, ["0", "1"], ["-1", "0.5"]),
    (cli.positive, ["1e-30", "2"], ["0", "-1", "nan", "inf"]),
    (cli.not_negative, ["0", "0.1"], ["-0.1", "nan", "inf"]),
    (cli.fraction, ["0", "0.5", "1"], ["-0.01", "1.01", "nan"]),
    (cli.port_number, ["1", "65535"], ["0", "65536"]),
])
def test_a_number_out_of_its_range_is_refused(kind, taken, refused):
    assert [kind(text) for text in taken] == [float(text) for text in taken]
    for text in refused:
        with pytest.raises(argparse.ArgumentTypeError, match=f"^'{text}' is not a"):
            kind(text)
