#!lua flags=allow-oom
-- Submits a group of finished samples: admitted and published at once. By: client of a scoring service.
-- ARGV: group, session, epoch, room (samples that its owner's sessions may have in work), memory_share, deadline_s, scoring_s,
--   scorers (1: group-scope scorers follow), source, digest of the whole, prompt, generation, tensors, kept (1: auditors
--   want it after its end); then digest and sample of each index.
-- Checks: no later client; no such group, nor one that was acknowledged; room (has_room); the share of Redis's memory.
-- Changes: creates the group, adds its samples to `samples`, arms its deadline.
-- Returns: submitted (also when it was before, and is in work) | scored (it was before, and its results wait) | returned
--   (it was acknowledged) | conflict (other samples under the same id) | full | memory | stale | unknown.
local session, n, whole = ARGV[2], (#ARGV - 14) / 2, ARGV[10]
local refused = refusal(session, ARGV[3])
if refused then return refused end
local known = redis.call('HGET', session_key(session, 'groups'), id)
if known then
  local digest, entry = unpack(words(known))
  return digest ~= whole and 'conflict' or entry == '-' and 'submitted' or 'scored'
end
if redis.call('ZSCORE', session_key(session, 'returned'), id) then return 'returned' end
if not has_room(session, n, tonumber(ARGV[4])) then return 'full' end
local used = memory_share()
if used > tonumber(ARGV[5]) then return 'memory' end
redis.call('HSET', group, 'phase', 'open', 'session', session, 'incarnation', '0', 'admission', whole, 'prompt', ARGV[11],
  'prompt_entry', '', 'n', n, 'needed', '0', 'split', 'train', 'step', '-1', 'source', ARGV[9], 'scorers', ARGV[8],
  'deadline_s', ARGV[6], 'scoring_s', ARGV[7], 'open', n, 'scored', '0', 'unpublished', '0', 'admitted', now_text)
if ARGV[14] == '1' then
  -- Callers come before auditors: no group is kept when memory is half full, or many wait to be stored.
  if used < tonumber(ARGV[5]) / 2 and redis.call('ZCARD', prefix .. 'kept') < 256 then
    redis.call('HSET', group, 'kept', 1)
  else
    count('kept_not')
  end
end
for i = 0, n - 1 do
  local digest, sample = ARGV[15 + 2 * i], ARGV[16 + 2 * i]
  local entry = redis.call('XADD', prefix .. 'samples', '*', 'sample', id .. ' ' .. i .. ' ' .. digest, 'record', sample)
  redis.call('HSET', group, 'tensors:' .. i, ARGV[13], 'sample:' .. i, sample,
    'published:' .. i, packed({'-', digest, '-', now_text, entry}, ARGV[12]))
end
redis.call('ZADD', open_groups, stamp(now + ARGV[6]), id)
redis.call('HSET', session_key(session, 'groups'), id, whole .. ' -')
count_in_work(session, n)
count('submitted')
return 'submitted'
