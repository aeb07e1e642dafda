-- Prompts to which a client has given a name, its id for the prompt. `digest` is the sha256 (hex) of the prompt as it was
-- sent. `turn` is the turn that ran the prompt, and no entry of this turn is older than `entry`. Both are NULL while the
-- prompt is in the inbox, and if it was cancelled there.
CREATE TABLE crow.prompts (
    session text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    digest text NOT NULL,
    message_id text COLLATE "C" NOT NULL,
    turn bigint,
    entry bigint,
    PRIMARY KEY (session, name)
);
CREATE INDEX prompts_waiting ON crow.prompts (session, message_id) WHERE turn IS NULL;
