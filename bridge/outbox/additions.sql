-- What was added to schema version 1 since: tables beside those of schema.sql, whose text stays as it is.
--
-- Each is made when a file is opened to be written and has it not yet. The version before passes over them, so a file
-- goes from one version to the other and back. Hence the rules for what stands here: every statement says IF NOT EXISTS;
-- a table says more of a row of schema.sql by that row's key, and a trigger keeps it in step while the version before
-- is at work; nothing here is needed to read what schema.sql has. A file that is opened only to be read may lack them.
--
-- decision_tokens  the signed text of each decision of the portal, as it came: what a person can check later

CREATE TABLE IF NOT EXISTS decision_tokens (
  arrival INTEGER PRIMARY KEY,      -- of the decision
  token TEXT NOT NULL               -- the JWS in compact form
);

CREATE TRIGGER IF NOT EXISTS decision_tokens_gone AFTER DELETE ON decisions BEGIN
  DELETE FROM decision_tokens WHERE arrival = old.arrival;
END;
