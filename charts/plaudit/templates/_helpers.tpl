{{- define "plaudit.labels" -}}
app.kubernetes.io/name: plaudit
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "plaudit.selector" -}}
app.kubernetes.io/name: plaudit
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- /* Defaults for the pods of jobs, as JSON. */ -}}
{{- define "plaudit.jobDefaults" -}}
{{ merge (deepCopy (.Values.jobDefaults | default dict)) (dict "runAsUser" (int .Values.runAsUser)) | toJson }}
{{- end }}

{{- /* Namespaces that the operator watches, separated by commas; empty: all. */ -}}
{{- define "plaudit.watched" -}}
{{ concat (compact (list .Values.watchNamespace)) (.Values.watchNamespaces | default list) | uniq | join "," }}
{{- end }}

{{- define "plaudit.name" -}}
{{ printf "%s-operator" .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end }}
