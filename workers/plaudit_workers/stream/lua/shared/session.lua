-- Put before all transitions: the sessions of clients that submit samples to a scoring service.
--
-- sessions (sorted set): names, by when they expire. Of each session:
--   session:<name> (hash): epoch, opened (the call that set it), keep_s, in_work (samples without a result).
--   session:<owner>:waiting (sorted set): its owner's sessions that were refused for want of room, by when.
-- in_work (hash): samples without a result of all sessions of an owner. The owner of a/b and a/c is a: names within one
--   token of a gateway. Other sessions are their own owners.
--   session:<name>:groups (hash): submitted and not acknowledged: group -> "digest entry", entry of its results or -.
--   session:<name>:results (stream): an entry a group that has ended, until the client acknowledges it.
--   session:<name>:returned (sorted set): the groups acknowledged last.

local function session_key(name, part)
  return prefix .. 'session:' .. name .. (part and ':' .. part or '')
end

local function owner_of(session)
  return string.match(session, '^[^/]*')
end

-- Counts samples that a session has in work, also for its owner.
local function count_in_work(session, by)
  local owner = owner_of(session)
  redis.call('HINCRBY', session_key(session), 'in_work', by)
  if redis.call('HINCRBY', prefix .. 'in_work', owner, by) <= 0 then redis.call('HDEL', prefix .. 'in_work', owner) end
end

-- Whether a session has room for n samples: its owner's sessions share one bound, in equal parts among those that were
-- refused within the last second. A group that alone exceeds the part may be in work alone.
local function has_room(session, n, most)
  local owner, waiting = owner_of(session), nil
  local own = tonumber(redis.call('HGET', session_key(session), 'in_work') or 0)
  local all = tonumber(redis.call('HGET', prefix .. 'in_work', owner) or 0)
  local part = most
  if own + n > most / 2 then
    waiting = session_key(owner, 'waiting')
    local others = redis.call('ZRANGEBYSCORE', waiting, stamp(now - 1), stamp(now + 1))
    local sharing = 1
    for _, other in ipairs(others) do if other ~= session then sharing = sharing + 1 end end
    part = most / sharing
  end
  local fits
  if own > 0 then fits = own + n <= part and all + n <= most else fits = all == 0 or all + math.min(n, part) <= most end
  if not fits and (session ~= owner or all > own) then
    waiting = session_key(owner, 'waiting')
    redis.call('ZADD', waiting, stamp(now), session)
    redis.call('EXPIRE', waiting, 10)
  end
  return fits
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
