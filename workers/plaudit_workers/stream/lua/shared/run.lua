-- Put before all transitions: the run's keys, the server's clock, and how an entry of a stream ends.
--
-- KEYS[1] is the prefix of the run's keys; they share one hash tag, so that it routes the call on a cluster.
-- state (hash): incarnation, takeover, step, recorded, announced. Nobody but the trainer writes it.
-- counters (hash): open:<split>, admitted, trained, evaluated, dropped, dropped:<reason>, duplicates:<stream>,
--   redelivered:<stream>, dead:<stream>, poison, groups_recreated, clock_steps, … Everybody counts here.
-- ARGV[1] is a group's id, or empty.
local prefix, state, counters, open_groups, sessions, id, group, now, now_text
local readers = {prompts = 'rollout', samples = 'reward', groups = 'reward', ready = 'trainer'}

-- Sets the variables above. Every transition begins with it: they outlive the call.
local function begin(KEYS, ARGV)
  prefix, id = KEYS[1], ARGV[1]
  state, counters, open_groups, sessions = prefix .. 'state', prefix .. 'counters', prefix .. 'open', prefix .. 'sessions'
  group = prefix .. 'group:' .. id
  local clock = redis.call('TIME')
  now_text = string.format('%s.%06d', clock[1], clock[2])
  now = tonumber(now_text)
end

local function stamp(seconds)
  return string.format('%.6f', seconds)
end

-- The memory that Redis uses and may use (0: no limit), in bytes, at most 10 ms old: INFO takes 20-30 µs, and a
-- connection brings few megabytes in 10 ms. The figures are of all runs, and outlive the call.
local memory = {asked = -1}
local function look_at_memory()
  if math.abs(now - memory.asked) > 0.01 then
    local about = redis.call('INFO', 'memory')
    memory = {asked = now, used = tonumber(string.match(about, 'used_memory:(%d+)')),
      limit = tonumber(string.match(about, 'maxmemory:(%d+)'))}
  end
  return memory
end

-- The used share of Redis's memory; 0 where it has no limit.
local function memory_share()
  local found = look_at_memory()
  return found.limit > 0 and found.used / found.limit or 0
end

local function words(text)
  local found = {}
  for word in string.gmatch(text, '%S+') do found[#found + 1] = word end
  return found
end

local function count(name, by)
  redis.call('HINCRBY', counters, name, by or '1') -- Redis writes a number as a double, which takes longer
end

-- Acks and deletes an entry that somebody has read. An unread one stays for whoever reads it: deleting it would turn
-- Redis's lag into nil, which autoscalers read as an empty queue.
local function retire(stream, entry)
  if entry and entry ~= '' and redis.call('XACK', prefix .. stream, readers[stream], entry) == 1 then
    redis.call('XDEL', prefix .. stream, entry)
  end
end

-- Who holds an entry, how often it was delivered, milliseconds since its lease was renewed; nil when nobody does.
local function holder(stream, entry)
  local found = redis.pcall('XPENDING', prefix .. stream, readers[stream], entry, entry, 1)
  if found.err or not found[1] then return nil, 0, 0 end
  return found[1][2], found[1][4], found[1][3]
end

-- Whether a later trainer has taken over. An incarnation that Redis has lost (FLUSHALL, an old append-only file) is
-- written again: the trainer is the authority.
local function stale(incarnation)
  local stored = tonumber(redis.call('HGET', state, 'incarnation') or 0)
  if stored < tonumber(incarnation) then redis.call('HSET', state, 'incarnation', incarnation) end
  return stored > tonumber(incarnation)
end

-- Notes which worker's lease of an entry lapsed, and when that worker was heard of last; for the dead letter.
local function note_loss(group_id, entry, seconds_ago, worker)
  local group = prefix .. 'group:' .. group_id
  if redis.call('EXISTS', group) == 1 then
    local before = redis.call('HGET', group, 'lost:' .. entry)
    local loss = worker .. '@' .. stamp(now - seconds_ago)
    redis.call('HSET', group, 'lost:' .. entry, before and before .. ' ' .. loss or loss)
  end
end

-- Notes which worker works on an entry and on nothing else; empty: none.
local function note_isolated(group_id, entry, worker)
  local group = prefix .. 'group:' .. (group_id or '')
  if redis.call('EXISTS', group) == 1 then redis.call('HSET', group, 'isolated:' .. entry, worker) end
end

-- Notes which worker took a sample first, and when, so that the time under an owner that was lost is known.
local function note_first(group_id, i, seconds_ago, worker)
  local group = prefix .. 'group:' .. group_id
  if redis.call('EXISTS', group) == 1 then
    redis.call('HSETNX', group, 'first:' .. i, stamp(now - seconds_ago) .. ' ' .. worker)
  end
end
