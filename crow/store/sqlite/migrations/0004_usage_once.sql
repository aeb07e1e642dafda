-- The result of a task repeats, as usage, what the entries of the sub-agent have already: it is no request of its own.
DROP VIEW usage;
-- Sums by session, model and day (UTC); an entry counts once, however many forks share it, and what a sub-agent used
-- counts for its own session (`sessions.parent_id` names whose it is).
CREATE VIEW usage AS
SELECT session, model, date(created_ms / 1000, 'unixepoch') AS day, count(*) AS requests,
    sum(input_tokens) AS input_tokens, sum(output_tokens) AS output_tokens, sum(cached_tokens) AS cached_tokens,
    sum(reasoning_tokens) AS reasoning_tokens, sum(cost) AS cost
FROM entries
WHERE kind <> 'tool' AND (input_tokens IS NOT NULL OR output_tokens IS NOT NULL OR cost IS NOT NULL)
GROUP BY session, model, day;
