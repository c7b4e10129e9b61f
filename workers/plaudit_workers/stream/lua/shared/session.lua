-- Put before all transitions: the sessions of clients that submit samples to a scoring service.
--
-- sessions (sorted set): names, by when they expire. Of each session:
--   session:<name> (hash): epoch, opened (the call that set it), keep_s, in_work (samples without a result).
--   session:<name>:groups (hash): submitted and not acknowledged: group -> "digest entry", entry of its results or -.
--   session:<name>:results (stream): an entry a group that has ended, until the client acknowledges it.
--   session:<name>:returned (sorted set): the groups acknowledged last.

local function session_key(name, part)
  return prefix .. 'session:' .. name .. (part and ':' .. part or '')
end

-- The session goes on to be kept from now on.
local function touch(name)
  redis.call('ZADD', sessions, stamp(now + redis.call('HGET', session_key(name), 'keep_s')), name)
end

-- Why a client has no say: `stale`, a later one goes by the session's name; `unknown`, the session was lost or has
-- expired: open it again. False when it has.
local function refusal(name, epoch)
  local stored = tonumber(redis.call('HGET', session_key(name), 'epoch') or 0)
  if stored == 0 then return 'unknown' end
  if stored > tonumber(epoch) then return 'stale' end
  if stored < tonumber(epoch) then redis.call('HSET', session_key(name), 'epoch', epoch) end
  touch(name)
  return false
end
