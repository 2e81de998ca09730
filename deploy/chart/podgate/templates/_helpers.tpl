{{- define "podgate.commonLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: podgate
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
{{- if eq .Release.Service "Helm" }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (replace "+" "_" .Chart.Version) | quote }}
{{- end }}
{{- end }}

{{- /* Names are fixed: a cluster has one podgate, and `kubectl podgate` finds its objects by them. */}}
{{- define "podgate.labels" -}}
app.kubernetes.io/name: podgate
app.kubernetes.io/component: agent
{{ include "podgate.commonLabels" . }}
{{- end }}

{{- define "podgate.controllerLabels" -}}
app.kubernetes.io/name: podgate-controller
app.kubernetes.io/component: controller
{{ include "podgate.commonLabels" . }}
{{- end }}

{{- define "podgate.proxyLabels" -}}
app.kubernetes.io/name: podgate-proxy
app.kubernetes.io/component: proxy
{{ include "podgate.commonLabels" . }}
{{- end }}

{{- define "podgate.hubLabels" -}}
app.kubernetes.io/name: podgate-hub
app.kubernetes.io/component: hub
{{ include "podgate.commonLabels" . }}
{{- end }}

{{- define "podgate.image" -}}
{{- with .Values.image -}}
{{ .registry }}/{{ .repository }}:{{ default $.Chart.AppVersion .tag }}{{ if .digest }}@{{ .digest }}{{ end }}
{{- end }}
{{- end }}

{{- /* The agents' user, as tokens of its account name it. */}}
{{- define "podgate.agentUser" -}}
system:serviceaccount:{{ .Release.Namespace }}:podgate
{{- end }}
