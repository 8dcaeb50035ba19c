"""Writes the tables of a report as CSV."""

import csv
import io
import numbers

from trainer.messages import printable
from trainer.report.document import Cell, Table

_FORMULA = ("=", "+", "-", "@")  # a text that begins so is a formula for spreadsheets


def csv_of(table: Table) -> str:
    r"""Writes a table as CSV (RFC 4180), for programs.

    The first line has the names of the columns. Numbers have all of their digits, without units and
    without separators of thousands: reading them gives the same float64; seconds stay seconds, and
    shares are fractions of 1. None is an empty field. A number that is not finite is nan, inf or
    -inf, which `float`, NumPy, pandas and R read. Lines end with CR LF. A text that a spreadsheet
    would compute, because it begins with =, +, - or @, gets an apostrophe in front; control
    characters are written as their escapes.

    Example:
        >>> from trainer.report.document import Column
        >>> columns = (Column("arm", "arm"), Column("mean", "mean", "number"))
        >>> csv_of(Table("means", "Means", columns, (("muon, tuned", 1 / 3), ("sgd", None))))
        'arm,mean\r\n"muon, tuned",0.3333333333333333\r\nsgd,\r\n'
    """
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\r\n")
    writer.writerow([column.name for column in table.columns])
    for row in table.rows:
        # csv writes a row of one empty field as "", so that its line is not empty.
        writer.writerow([_field(value) for value in row])
    return file.getvalue()


def _field(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        text = printable(value)
        return f"'{text}" if text.startswith(_FORMULA) else text
    # Convert NumPy's numbers first: their repr is "np.float64(0.5)".
    return str(int(value)) if isinstance(value, numbers.Integral) else repr(float(value))
