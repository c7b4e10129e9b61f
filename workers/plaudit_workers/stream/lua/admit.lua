#!lua flags=allow-oom
-- Admits a group. By: trainer.
-- ARGV: group, call, incarnation, split, bound (open groups of the split), memory_share, n, needed, deadline_s,
--   scoring_s, scorers (1: group-scope scorers follow), step, source, prompt.
-- Checks: no later trainer; below the bound of groups; below the share of Redis's memory (allow-oom: a full memory is an
--   answer, not an error); the id is new.
-- Changes: creates the group, adds it to `prompts` and `open`; admitted + 1.
-- Returns: admitted | full | memory | duplicate | stale; for the same call the same, unless there is room by now.
local call, incarnation, split = ARGV[2], ARGV[3], ARGV[4]
if stale(incarnation) then return 'stale' end
local known = redis.call('HGET', group, 'admission')
if known == call then return 'admitted' end
if known or redis.call('ZSCORE', prefix .. 'closed', id) then return 'duplicate' end
if tonumber(redis.call('HGET', counters, 'open:' .. split) or 0) >= tonumber(ARGV[5]) then return 'full' end
if memory_share() > tonumber(ARGV[6]) then return 'memory' end
local entry = redis.call('XADD', prefix .. 'prompts', '*', 'group', id, 'record', ARGV[14])
redis.call('HSET', group, 'phase', 'open', 'incarnation', incarnation, 'admission', call, 'prompt', ARGV[14],
  'prompt_entry', entry, 'n', ARGV[7], 'needed', ARGV[8], 'split', split, 'step', ARGV[12], 'source', ARGV[13],
  'scorers', ARGV[11], 'deadline_s', ARGV[9], 'scoring_s', ARGV[10], 'open', ARGV[7], 'scored', 0,
  'unpublished', ARGV[7], 'admitted', now_text)
redis.call('ZADD', open_groups, '+inf', id)
count('admitted')
count('open:' .. split)
return 'admitted'
