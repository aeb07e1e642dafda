-- Where imported conversations came from: `hash` is the sha256 (hex) of their lines in the file.
CREATE TABLE imports (
    conversation INTEGER PRIMARY KEY,
    hash TEXT NOT NULL,
    created_ms INTEGER NOT NULL
);
CREATE INDEX imports_by_hash ON imports (hash);
CREATE TRIGGER imports_go_with_their_conversation AFTER DELETE ON conversations
BEGIN
    DELETE FROM imports WHERE conversation = OLD.id;
END;
