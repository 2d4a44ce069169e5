"""The tokenizer of a base, which needs no torch and lives with the data."""

from tunerack.data.tokenizer import TextStream as TextStream
from tunerack.data.tokenizer import Tokenizer as Tokenizer
