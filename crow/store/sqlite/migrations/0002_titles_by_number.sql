-- `searchable` names a title by -number: without this, looking up one id of the view reads every session.
CREATE INDEX sessions_by_search_id ON sessions (-number) WHERE title IS NOT NULL;
