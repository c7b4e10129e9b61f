-- Put before all transitions: a group's hash, how a sample becomes terminal, and the completion rule.
--
-- ARGV[1] is the group's id. Fields of the hash:
--   phase, incarnation, admission, prompt, prompt_entry, n, needed, split, step, source, scorers, deadline_s, scoring_s,
--   open (samples not terminal), scored, unpublished (neither published nor terminal), drop, admitted, terminal, ready,
--   entry (of `ready` or `groups`), reason, released, session (whose client submitted it), kept (1: for
--   auditors); and of sample i
--   tensors:i, sample:i, first:i = "time worker",
--   published:i = "call digest taken published entry", a line end, the generation record,
--   ended:i = "call outcome taken committed deliveries first_taken" (- for none), a line end, the scoring record,
--   duplicate:<call> (counted already); and of an entry that was taken over lost:<entry> = "worker@time …",
--   isolated:<entry> = the worker that works on it and on nothing else, or empty. A call is the token that its sender gave it: a repeat has the same.

local function packed(head, record)
  return table.concat(head, ' ') .. '\n' .. record
end

-- The words of what `packed` made, and the record after them; false where the field is absent.
local function unpacked(text)
  if not text then return false end
  local line_end = string.find(text, '\n', 1, true)
  local found = words(string.sub(text, 1, line_end - 1))
  found.record = string.sub(text, line_end + 1)
  return found
end

-- The group, and what was published and decided of sample i. A group that is gone has no phase.
local function look(i)
  local f = redis.call('HMGET', group, 'phase', 'n', 'open', 'scored', 'unpublished', 'needed', 'split', 'step', 'source',
    'scorers', 'admitted', 'deadline_s', 'scoring_s', 'drop', 'prompt_entry', 'published:' .. i, 'ended:' .. i,
    'first:' .. i, 'session', 'kept', 'admission')
  return {phase = f[1], n = tonumber(f[2] or 0), open = tonumber(f[3] or 0), scored = tonumber(f[4] or 0),
    unpublished = tonumber(f[5] or 0), needed = tonumber(f[6] or 0), split = f[7], step = f[8], source = f[9],
    scorers = f[10] == '1', admitted = f[11], deadline_s = tonumber(f[12] or 0), scoring_s = tonumber(f[13] or 0),
    drop = f[14] == '1', prompt_entry = f[15], published = unpacked(f[16]), ended = unpacked(f[17]),
    first = f[18] and words(f[18]), session = f[19], kept = f[20], admission = f[21]}
end

-- How many entries `events` may keep, for the next event with so many bytes: a tenth of Redis's memory, or 100,000
-- samples for a reader that is away, whichever is less. The bytes of an entry are those of the last hundreds of events on
-- average; these sums outlive the call, by run. INFO costs more than an event, so only each 16th event trims: nil for the
-- others.
local newest = {}
local function events_kept(bytes, samples)
  local sums = newest[prefix] or {entries = 0, bytes = 0}
  newest[prefix] = sums
  sums.entries, sums.bytes = sums.entries + 1, sums.bytes + bytes
  if sums.entries % 16 ~= 0 then return nil end
  local limit = look_at_memory().limit
  local kept = math.min(100000, math.floor(200000 / samples))
  if limit > 0 then kept = math.min(kept, math.floor(limit * 0.1 * sums.entries / sums.bytes)) end
  if sums.entries >= 512 then sums.entries, sums.bytes = sums.entries / 2, sums.bytes / 2 end
  return kept
end

-- Whether the group goes on after its last sample has ended: to its trainer, to group-scope scorers, to auditors.
local function goes_on(g)
  return not g.session or g.scorers or g.kept
end

-- What is known of the samples, read once, when none of it changes any more: published:i and ended:i one after the other,
-- false where absent.
local function written(g)
  if g.written then return g.written end
  local found, most = {}, 256
  for first = 0, g.n - 1, most do
    local names = {}
    for i = first, math.min(first + most, g.n) - 1 do
      names[#names + 1], names[#names + 2] = 'published:' .. i, 'ended:' .. i
    end
    for _, value in ipairs(redis.call('HMGET', group, unpack(names))) do found[#found + 1] = value end
  end
  if g.last then found[2 * g.last.i + 2] = g.last.ended end
  g.written = found
  return found
end

-- Reports a group's samples to the metrics, once all scores are final, as its hash holds them. One event for up to 256:
-- one for each sample would cost ten times as much.
local function report(g)
  local most, samples = 256, written(g)
  for first = 0, g.n - 1, most do
    local fields, bytes = {}, 0
    for i = first, math.min(first + most, g.n) - 1 do
      for place, name in ipairs({'published:', 'ended:'}) do
        local value = samples[2 * i + place]
        if value then
          fields[#fields + 1], fields[#fields + 2] = name .. i, value
          bytes = bytes + #value
        end
      end
    end
    local kept = events_kept(bytes, math.min(g.n, most))
    local event = {'XADD', prefix .. 'events'}
    for _, word in ipairs(kept and {'MAXLEN', '~', kept} or {}) do event[#event + 1] = word end
    for _, word in ipairs({'*', 'kind', 'samples', 'group', id, 'split', g.split, 'step', g.step, 'data_source', g.source,
      'admitted', g.admitted}) do event[#event + 1] = word end
    for _, word in ipairs(fields) do event[#event + 1] = word end
    redis.call(unpack(event))
  end
end

-- Makes sample i terminal. The caller has seen that it is not, and calls `complete` when none is left.
local function finish(g, i, published, ended, scoring)
  g.open = g.open - 1
  if ended[2] == 'scored' then g.scored = g.scored + 1 end
  if g.open == 0 and not goes_on(g) then
    g.last = {i = i, ended = packed(ended, scoring)} -- the hash ends with this call
    return
  end
  redis.call('HSET', group, 'ended:' .. i, packed(ended, scoring), 'open', g.open, 'scored', g.scored)
  if not published then
    g.unpublished = g.unpublished - 1
    redis.call('HSET', group, 'unpublished', g.unpublished)
  end
end

-- Ends every sample that is not terminal with one outcome, and with it what streams hold of them.
local function finish_missing(g, call, outcome, scoring)
  for i = 0, g.n - 1 do
    local f = redis.call('HMGET', group, 'ended:' .. i, 'published:' .. i)
    if not f[1] then
      local published = unpacked(f[2])
      finish(g, i, published, {call, outcome, '-', now_text, 0, '-'}, scoring)
      if published then retire('samples', published[5]) end
    end
  end
  retire('prompts', g.prompt_entry)
end

-- Puts the scores of a session's group into its results: under each index "published committed deliveries", a line end,
-- the scoring record.
local function deliver(g)
  local samples, entry = written(g), {'XADD', session_key(g.session, 'results'), '*', 'group', id}
  for i = 0, g.n - 1 do
    local published, ended = unpacked(samples[2 * i + 1]), unpacked(samples[2 * i + 2])
    entry[#entry + 1], entry[#entry + 2] = i, packed({published[4], ended[4], ended[5]}, ended.record)
  end
  local result = redis.call(unpack(entry))
  redis.call('HSET', session_key(g.session, 'groups'), id, g.admission .. ' ' .. result)
  count_in_work(g.session, -g.n)
  if g.kept then
    redis.call('RENAME', group, prefix .. 'kept:' .. id)
    redis.call('ZADD', prefix .. 'kept', now_text, id)
  else
    redis.call('UNLINK', group)
  end
  redis.call('ZREM', open_groups, id)
end

-- Hands the group to whoever admitted it. The trainer's: phase `ready` to be trained, `dropped` to be closed with that
-- reason. A session's: its scores become an entry of the session's results, and the group is gone
-- or waits under another key until it is stored for auditors.
local function settle(g, phase, reason)
  report(g)
  if g.session then return deliver(g) end
  local entry = redis.call('XADD', prefix .. 'ready', '*', 'group', id)
  redis.call('HSET', group, 'phase', phase, 'ready', now_text, 'entry', entry, 'reason', reason)
  redis.call('ZADD', open_groups, '+inf', id)
end

-- The completion rule, for a group whose samples are all terminal.
local function complete(g)
  if g.phase == 'open' and goes_on(g) then redis.call('HSET', group, 'terminal', now_text) end
  if g.drop and g.split == 'train' then
    settle(g, 'dropped', 'drop_group')
  elseif g.scored < g.needed then
    settle(g, 'dropped', 'too_few_scored')
  elseif g.scorers and g.phase == 'open' then
    local entry = redis.call('XADD', prefix .. 'groups', '*', 'group', id)
    redis.call('HSET', group, 'phase', 'group_scoring', 'entry', entry)
    redis.call('ZADD', open_groups, stamp(now + g.scoring_s), id)
  else
    settle(g, 'ready', '')
  end
end

-- Replaces the samples' results by those of the group-scope scorers (arguments[first] on: outcome and record of each index)
-- and completes the group.
local function regrade(g, arguments, first)
  g.scored = 0
  for i = 0, g.n - 1 do
    local ended = unpacked(redis.call('HGET', group, 'ended:' .. i))
    ended[2] = arguments[first + 2 * i]
    if ended[2] == 'scored' then g.scored = g.scored + 1 end
    redis.call('HSET', group, 'ended:' .. i, packed(ended, arguments[first + 2 * i + 1]))
  end
  redis.call('HSET', group, 'scored', g.scored)
  complete(g)
end

-- Counts work that was done twice; a repeated call counts once.
local function duplicate(stream, call)
  if redis.call('HSETNX', group, 'duplicate:' .. call, 1) == 1 then count('duplicates:' .. stream) end
  return 'duplicate'
end
