#!lua flags=allow-oom
-- Submits groups of finished samples: admitted and published at once. By: client of a scoring service.
-- ARGV: '', session, epoch, room (samples that its owner's sessions may have in work), memory_share, deadline_s, scoring_s,
--   scorers (1: group-scope scorers follow); then of each group: id, its number of samples, source, digest of the whole,
--   prompt, generation, tensors, kept (1: auditors want it after its end), digest and sample of each index.
-- Checks: no later client; of each group: no such group, nor one that was acknowledged; room (room_of); the share of
--   Redis's memory.
-- Changes: creates the groups, adds their samples to `samples`, arms their deadlines. A group holds its prompt and bodies
--   only where somebody reads them: group-scope scorers, auditors.
-- Returns: stale | unknown, or of each group: submitted (also when it was before, and is in work) | scored (it was before,
--   and its results wait) | returned (it was acknowledged) | conflict (other samples under the same id) | full | memory.
local session = ARGV[2]
local refused, shared = refusal(session, ARGV[3])
if refused then return refused end
local share, groups, used = tonumber(ARGV[5]), session_key(session, 'groups'), memory_share()
local take_room = room_of(session, tonumber(ARGV[4]))
local deadline, num_samples, answers, open, known, created = stamp(now + ARGV[6]), 0, {}, {}, {}, {}

local function wanted_by_auditors()
  -- Callers come before auditors: no group is kept when memory is half full, or many wait to be stored.
  if used < share / 2 and redis.call('ZCARD', prefix .. 'kept') < 256 then return true end
  count('kept_not')
  return false
end

-- Makes the hash of a group; if Redis refuses that, nothing is offered.
local function create(at, n)
  local kept = ARGV[at + 7] == '1' and wanted_by_auditors()
  redis.call('HSET', prefix .. 'group:' .. ARGV[at], 'phase', 'open', 'session', session, 'incarnation', '0', 'admission',
    ARGV[at + 3], 'prompt_entry', '', 'n', n, 'needed', '0', 'split', 'train', 'step', '-1', 'source', ARGV[at + 2],
    'scorers', ARGV[8], 'deadline_s', ARGV[6], 'scoring_s', ARGV[7], 'open', n, 'scored', '0', 'unpublished', '0',
    'admitted', now_text)
  if kept then redis.call('HSET', prefix .. 'group:' .. ARGV[at], 'kept', '1') end
  created[#created + 1] = {at = at, n = n, is_read = kept or ARGV[8] == '1'}
end

local function offer(made)
  local at, group = made.at, prefix .. 'group:' .. ARGV[made.at]
  if made.is_read then redis.call('HSET', group, 'prompt', ARGV[at + 4]) end
  for i = 0, made.n - 1 do
    local digest, sample = ARGV[at + 8 + 2 * i], ARGV[at + 9 + 2 * i]
    local about = ARGV[at] .. ' ' .. i .. ' ' .. digest
    local entry = redis.call('XADD', prefix .. 'samples', '*', 'sample', about, 'record', sample)
    redis.call('HSET', group, 'published:' .. i, packed({'-', digest, '-', now_text, entry}, ARGV[at + 5]))
    if made.is_read then redis.call('HSET', group, 'tensors:' .. i, ARGV[at + 6], 'sample:' .. i, sample) end
  end
end

local function submit(at, before)
  local own, n, whole = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 3]
  if before then
    local digest, entry = unpack(words(before))
    return digest ~= whole and 'conflict' or entry == '-' and 'submitted' or 'scored'
  end
  if not shared and redis.call('ZSCORE', session_key(session, 'returned'), own) then return 'returned' end
  if not take_room(n) then return 'full' end
  if used > share then return 'memory' end
  create(at, n)
  known[own], num_samples = whole .. ' -', num_samples + n
  open[#open + 1], open[#open + 2] = deadline, own
  return 'submitted'
end

local at, places, ids = 9, {}, {}
while at < #ARGV do
  places[#places + 1], ids[#ids + 1] = at, ARGV[at]
  at = at + 8 + 2 * ARGV[at + 1]
end
local before = redis.call('HMGET', groups, unpack(ids))
for i, place in ipairs(places) do answers[i] = submit(place, known[ids[i]] or before[i]) end
if num_samples > 0 then
  local about = {}
  for own, text in pairs(known) do about[#about + 1], about[#about + 2] = own, text end
  redis.call('ZADD', open_groups, unpack(open))
  redis.call('HSET', groups, unpack(about))
  count_in_work(session, num_samples)
  count('submitted', #created)
  for _, made in ipairs(created) do offer(made) end
end
return answers
