-- crc32 of an entry's other columns (`crow/store/rows.py:checksum`); NULL in entries that older versions wrote.
ALTER TABLE entries ADD COLUMN checksum INTEGER;
