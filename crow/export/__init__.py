"""Sessions as documents for people: one HTML file, with secrets masked."""
